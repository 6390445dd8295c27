// Files: those named on the command line, and any that is dropped here; the server reads what is in them.

import { append, h } from "./dom.js";

export function openedPage(main, catalogue, answerView, json, resized) {
  const answer = h("section", { class: "answer", "aria-label": "What the file says", hidden: true });
  const title = h("h2", { tabindex: -1 });
  const wrong = h("p", { class: "wrong", role: "alert", hidden: true });
  const seconds = h("span", { "aria-hidden": "true" });
  const doing = h("span", { role: "status" });
  const pending = h("p", { class: "pending", hidden: true }, h("progress", { "aria-label": "Reading" }), doing, seconds);
  const pick = h("input", { type: "file", "aria-label": "Choose a file", accept: ".json,application/json" });
  const drop = h("div", { class: "drop" }, h("p", {}, "Drop a plan, or what rooftop compile, explain or simulate "
    + "wrote with --json. It is read on this machine, and not kept."), pick);
  append(answer, title);
  const view = answerView(answer);

  let ticking = 0;
  function tell(words) {
    clearInterval(ticking);
    pending.hidden = !words;
    doing.textContent = words;
    const since = Date.now();
    const tick = () => { seconds.textContent = `, ${Math.round((Date.now() - since) / 1000)} s`; };
    tick();
    if (words) ticking = setInterval(tick, 1000);
  }

  let shown = 0;
  /** Shows what is asked for; what comes after something newer was asked for is left. `rest` has what is pending. */
  async function show(asked, byHand, rest = null) {
    const own = shown += 1;
    let found;
    try { found = await asked; } catch { found = { error: { message: "rooftop ui has ended, or the file is too large" } }; }
    if (own !== shown) return;
    tell(found.pending && rest ? found.pending : "");
    wrong.hidden = !found.error;
    answer.hidden = Boolean(found.error);
    if (found.error) { wrong.textContent = found.error.message; return; }
    title.textContent = `${found.name}: ${found.what}`;
    view.show(found, null);
    if (byHand) title.focus();
    if (found.pending && rest) await show(json(rest), false);
  }
  const send = (file) => { if (file) show(json(`/api/open?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file }), true); };
  pick.addEventListener("change", () => send(pick.files[0]));
  for (const event of ["dragenter", "dragover"]) drop.addEventListener(event, (e) => { e.preventDefault(); drop.classList.add("over"); });
  for (const event of ["dragleave", "drop"]) drop.addEventListener(event, (e) => { e.preventDefault(); drop.classList.remove("over"); });
  drop.addEventListener("drop", (event) => send(event.dataTransfer.files[0]));

  const buttons = catalogue.files.map((file, index) =>
    h("button", { type: "button", onclick: () => choose(index, true) }, file));
  let chosen = null;
  resized(() => { if (chosen !== null) choose(chosen, false); });
  function choose(index, byHand) {
    chosen = index;
    history.replaceState(null, "", `/open?file=${index}`);
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", at === index));
    show(json(`/api/files/${index}?now`), byHand, `/api/files/${index}`);
  }
  append(main, h("h1", {}, "Open a file"),
    h("p", { class: "lede" }, "Plans, compilations and explained runs: what they say, their ledger and timeline."),
    buttons.length ? h("div", { class: "named" }, buttons) : null,
    drop, wrong, pending, h("div", { class: "spaced" }, answer));
  const index = new URLSearchParams(location.search).get("file");
  if (index !== null || catalogue.files.length === 1) choose(Number(index ?? 0), false);
}
