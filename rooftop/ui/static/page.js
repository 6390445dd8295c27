// What page this is, its explorer, and the loop: a change, a question, an answer.

import { drawChart } from "./charts.js";
import { append, copied, h, replace } from "./dom.js";
import { buildForm } from "./form.js";
import { openedPage } from "./opened.js";

const main = document.getElementById("main");
const live = document.getElementById("live");
const name = location.pathname.slice(1);

/** Pixels inside a chart that has a row for itself, half of one, or a third: page.css says how rows are cut. */
function widths() {
  const controls = name && !["open", "glossary"].includes(name) && !matchMedia("(max-width: 860px)").matches ? 368 : 0;
  const room = main.clientWidth - 2 * parseFloat(getComputedStyle(main).paddingLeft) - controls;
  const columns = matchMedia("(max-width: 1080px)").matches ? [1, 1, 1] : [1, 2, 3];
  return columns.map((count) => Math.floor((room - 18 * (count - 1)) / count - 36)).join(",");
}

async function json(address, options = {}) {
  const response = await fetch(address, { ...options, headers: { "Chart-Widths": widths() } });
  if (response.headers.get("content-type") !== "application/json") {
    return { error: { field: "", message: "rooftop could not answer this; its terminal says why" } };
  }
  return response.json();
}

function menu(catalogue) {
  const entries = [...Object.entries(catalogue.explorers), ["open", "Open a file"], ["glossary", "Glossary"]];
  append(document.getElementById("menu"), ...entries.map(([key, title]) =>
    h("li", {}, h("a", { href: `/${key}`, "aria-current": key === name ? "page" : null }, title))));
  document.querySelector("#menu [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
}

function theme() {
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* it lasts for this page, then */ }
  });
}

async function home(catalogue) {
  const found = await Promise.all(Object.keys(catalogue.explorers).map((key) => json(`/api/${key}/controls`)));
  append(main,
    h("h1", {}, "What a model costs, before it runs"),
    h("p", { class: "lede" }, "Each page uses the planner of the command line and shows the equivalent command. "
      + "Share a view by its URL."),
    h("div", { class: "cards" },
      found.map((each) => h("a", { class: "card panel", href: `/${each.name}` }, h("h2", {}, each.title), h("p", {}, each.summary, " ", h("span", { class: "chapter" }, each.chapter)))),
      h("a", { class: "card panel", href: "/open" }, h("h2", {}, "Open a file"),
        h("p", {}, "A plan, a compilation or an explained run: its ledger, timeline and rooflines."))),
  );
}

async function explorerPage() {
  const declared = await json(`/api/${name}/controls`);
  if (declared.error) { append(main, h("h1", {}, "There is no such page"), h("p", {}, declared.error.message)); return; }
  document.title = `${declared.title} · rooftop`;
  const answer = h("section", { class: "answer", "aria-label": "Answer", hidden: true });
  const given = Object.fromEntries(new URLSearchParams(location.search));
  const known = new Set(declared.controls.map((control) => control.name));
  const strange = Object.keys(given).filter((key) => !known.has(key));
  let asking = false;
  let again = false;
  const form = buildForm(declared.controls, given, () => { ask(); });
  const view = answerView(answer);

  const query = () => {
    const changed = Object.entries(form.read()).filter(([key, value]) =>
      value !== declared.controls.find((control) => control.name === key).default);
    const found = new URLSearchParams(changed).toString();
    return found ? `?${found}` : "";
  };

  async function ask() {
    if (asking) { again = true; return; }
    asking = true;
    do {
      again = false;
      const asked = query();
      let found;
      try { found = await json(`/api/${name}${asked}`); } catch { found = { error: { field: "", message: "rooftop ui has ended: start it again" } }; }
      form.mark(found.error);
      answer.classList.toggle("stale", Boolean(found.error));
      if (!found.error) {
        answer.hidden = false;
        view.show(found, `${location.origin}/api/${name}${asked}`);
      }
      remember(asked);
    } while (again);
    asking = false;
    document.body.dataset.asked = query();
  }

  append(main,
    h("h1", {}, declared.title),
    h("p", { class: "lede" }, declared.summary, h("span", { class: "chapter" }, declared.chapter)),
    strange.length ? h("p", { class: "wrong", role: "status" },
      `This link sets ${strange.join(", ")}, which this page does not have: ignored.`) : null,
    h("div", { class: "layout" }, form.form, answer),
  );
  resized(ask);
  await ask();
}

/** Pictures are drawn again where their width has changed. */
function resized(again) {
  let before = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (innerWidth !== before) { before = innerWidth; again(); } }, 200);
  });
}

let remembering = 0;
/** The state goes into the address, not more often than browsers allow. */
function remember(query) {
  clearTimeout(remembering);
  remembering = setTimeout(() => history.replaceState(null, "", location.pathname + query), 120);
}

/** Shows answers in one place: figures that change keep their element, charts are drawn anew. */
export function answerView(place) {
  const verdict = h("p", { class: "verdict", role: "status", "aria-live": "polite" });
  const details = h("p", { class: "details" });
  const figures = h("dl", { class: "figures panel" });
  const charts = h("div", { class: "charts" });
  const notes = h("ul", { class: "notes panel" });
  const command = h("code", { tabindex: 0, "aria-label": "The command that says the same" });
  const copy = h("button", { type: "button", onclick: () => copied(copy, command.textContent) }, "Copy");
  const link = h("a", {}, "This answer as JSON");
  const same = h("div", { class: "same panel" }, h("h2", {}, "The same on the command line"),
    h("div", { class: "line" }, command, copy));
  const source = h("p", { class: "source" });
  const shown = new Map();
  append(place, verdict, details, figures, charts, notes, same, source);

  function show(found, address) {
    if (verdict.textContent !== found.verdict) verdict.textContent = found.verdict;
    verdict.classList.toggle("no", Boolean(found.no));
    details.textContent = [found.verdict === found.no ? "" : found.no, ...found.details].filter(Boolean).join("\n");
    details.hidden = !details.textContent;
    const changed = [];
    const kept = new Set(found.figures.map((figure) => figure.name));
    for (const [key, tile] of shown) if (!kept.has(key)) { tile.element.remove(); shown.delete(key); }
    for (const figure of found.figures) {
      const tile = shown.get(figure.name) ?? tileOf(figure);
      if (tile.value.textContent !== figure.text) {
        if (tile.value.textContent) changed.push(`${figure.label} ${figure.text}`);
        tile.value.textContent = figure.text;
      }
      tile.value.classList.toggle("words", figure.text.length > 14);
      tile.label.textContent = figure.label;
      replace(tile.level, figure.mark ? word(figure.mark, figure.mark) : null);
      tile.formula.textContent = [figure.note, figure.formula, figure.source].filter(Boolean).join(" · ");
      append(figures, tile.element);
      shown.set(figure.name, tile);
    }
    figures.hidden = found.figures.length === 0;
    announce(changed.slice(0, 3).join(". "));
    drawAll(charts, found.charts);
    replace(notes, ...found.notes.map((note) => h("li", {}, note)));
    notes.hidden = found.notes.length === 0;
    replace(command, ...found.command.split(" ").flatMap((word, index) =>
      [index ? " " : "", word.startsWith("--") ? h("span", { class: "whole" }, word) : word]));
    same.hidden = !found.command;
    if (address) link.href = address;
    replace(source, found.sources.join(" "), " ", address ? link : "");
  }

  function tileOf(figure) {
    const label = h("span", {});
    const level = h("span", { class: "level" });
    const value = h("span", { class: "value" });
    const formula = h("span", { class: "formula" });
    const element = h("div", { class: "figure", "data-figure": figure.name },
      h("dt", {}, label, level), h("dd", {}, value), h("dd", { class: "formula" }, formula));
    return { element, label, level, value, formula };
  }
  return { show };
}


/** A word that leads to its entry in the glossary. */
const word = (anchor, text) => h("a", { href: `/glossary#${anchor}` }, text);

async function glossaryPage() {
  const found = await json("/api/glossary");
  document.title = "Glossary · rooftop";
  append(main, h("h1", {}, "Glossary"), h("p", { class: "lede" }, "Words of answers. On the command line: rooftop help glossary."),
    h("dl", { class: "glossary panel" }, found.entries.flatMap((entry) =>
      [h("dt", { id: entry.anchor }, entry.words), h("dd", {}, entry.meaning)])));
  // The entry that the address names is there only now.
  document.getElementById(location.hash.slice(1))?.scrollIntoView({ block: "center" });
}

let saying = 0;
/** Says what changed when the hand rests, so that a screen reader is not talked over. */
function announce(words) {
  if (!words) return;
  clearTimeout(saying);
  saying = setTimeout(() => { live.textContent = words; }, 500);
}

const drawn = new Map();
/** Draws charts into figures that stay, so that what is open or playing stays so. */
function drawAll(place, charts) {
  const titles = charts.map((chart, index) => `${index} ${chart.kind}`);
  for (const [key, chart] of drawn) if (!titles.includes(key)) { chart.element.remove(); drawn.delete(key); }
  charts.forEach((chart, index) => {
    const key = titles[index];
    if (!drawn.has(key)) drawn.set(key, drawChart(chart.kind));
    append(place, drawn.get(key).element);
    drawn.get(key).show(chart);
  });
}

const catalogue = await json("/api");
menu(catalogue);
theme();
if (!name) await home(catalogue);
else if (name === "glossary") await glossaryPage();
else if (name === "open") openedPage(main, catalogue, answerView, json, resized);
else await explorerPage();
document.body.dataset.ready = "yes";
