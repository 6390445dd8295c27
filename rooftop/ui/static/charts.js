// A chart: its title, its picture, and its data as a table. Pictures come from the server as SVG.

import { append, copied, h, replace } from "./dom.js";
import { framesPlayer } from "./frames.js";

let counted = 0;

/** An empty chart of a kind; `show(data)` fills it. */
export function drawChart(kind) {
  return kind === "listing" ? drawListing() : drawPicture(kind);
}

/** A text to copy, such as a file. */
function drawListing() {
  const id = `title-${counted += 1}`;
  const title = h("h2", { id });
  const about = h("p", { class: "about" });
  const text = h("pre", { class: "scroll", tabindex: 0, role: "region" });
  const copy = h("button", { type: "button", onclick: () => copied(copy, text.textContent) }, "Copy");
  const element = h("figure", { class: "chart panel listing", "aria-labelledby": id }, h("div", { class: "head" }, title, copy), about, text);
  return {
    element,
    show(found) {
      title.textContent = found.title;
      about.textContent = found.about;
      about.hidden = !found.about;
      text.textContent = found.text;
      text.setAttribute("aria-label", found.title);
      copy.setAttribute("aria-label", `Copy: ${found.title}`);
      rooftopCharts(element);
    },
  };
}

function drawPicture(kind) {
  const id = `title-${counted += 1}`;
  const title = h("h2", { id });
  const about = h("p", { class: "about" });
  const picture = h("div", { class: "picture" });
  const body = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Data" });
  const data = h("details", { class: "data", ontoggle: () => fillTable() }, h("summary", {}, "Data"), body);
  const element = h("figure", { class: "chart panel", "aria-labelledby": id }, title, about, picture);
  const player = kind === "frames" ? framesPlayer(picture) : null;
  let chart = null;

  function fillTable() {
    if (chart && (data.open || kind === "table")) replace(body, table(chart));
  }
  append(element, kind === "table" ? body : data);
  if (player) new ResizeObserver(() => { if (chart) player.show(chart, Math.floor(picture.clientWidth)); }).observe(element);
  return {
    element,
    show(found) {
      chart = found;
      title.textContent = found.title;
      about.textContent = found.about;
      about.hidden = !found.about;
      body.setAttribute("aria-label", kind === "table" ? found.title : `Data of ${found.title}`);
      element.className = `chart panel ${found.place}`;
      if (player) player.show(found, Math.floor(picture.clientWidth) || 600);
      // The server escapes every text in it.
      else picture.innerHTML = found.svg;
      fillTable();
      rooftopCharts(element);
    },
  };
}

function table({ columns, rows, numeric, below = [] }) {
  const numbers = numeric ?? columns.map((_, column) => rows.length > 0 && rows.every((row) => /^[-−]?[\d.,]+( ?[a-zA-Z%/]+)?$/.test(row[column] || "0")));
  const kind = (column, text = "") => (numbers[column] ? "number" : text.length > 60 ? "long" : null);
  const beside = [...columns.keys()].filter((column) => !below.includes(column));
  const more = (row) => below.filter((column) => row[column]).map((column) => columns[column] ? `${columns[column]}: ${row[column]}` : row[column]).join("; ");
  return h("table", {},
    columns.some(Boolean) ? h("thead", {}, h("tr", {}, beside.map((column) => columns[column] ? h("th", { scope: "col", class: kind(column) }, columns[column]) : h("td", {})))) : null,
    h("tbody", {}, rows.slice(0, 2000).map((row) => [
      h("tr", {}, beside.map((column) => h("td", { class: kind(column, row[column]) }, row[column]))),
      more(row) ? h("tr", {}, h("td", { class: "below", colspan: beside.length }, h("div", {}, more(row)))) : null])));
}
