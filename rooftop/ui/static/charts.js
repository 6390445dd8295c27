// A chart: its title, its picture, its legend, and its data as a table. Pictures are drawn at the width that they have.

import { drawBars, drawBlocks, drawSpans } from "./boxes.js";
import { h, quantity } from "./dom.js";
import { framesPlayer } from "./frames.js";
import { drawLines } from "./lines.js";

const DRAWERS = { lines: drawLines, bars: drawBars, spans: drawSpans, blocks: drawBlocks };
let counted = 0;

/** An empty chart of a kind; `show(data)` fills it. */
export function drawChart(kind) {
  const id = `chart-${counted += 1}`;
  const title = h("h2", { id });
  const about = h("p", { class: "about" });
  const picture = h("div", { class: "picture" });
  const body = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Data" });
  const data = h("details", { class: "data", ontoggle: () => fillTable() }, h("summary", {}, "Data"), body);
  const element = h("figure", { class: "chart panel", "aria-labelledby": id }, title, about, picture);
  const player = kind === "frames" ? framesPlayer(picture) : null;
  let chart = null;
  let width = 0;

  function fillTable() {
    if (chart && (data.open || kind === "table")) body.replaceChildren(table(tableOf(chart)));
  }
  function draw() {
    if (!chart || !width) return;
    if (player) player.show(chart, width);
    else if (DRAWERS[kind]) picture.replaceChildren(...DRAWERS[kind](chart, width, element));
    fillTable();
  }
  if (kind === "table") element.append(body);
  else element.append(data);
  element.classList.add({ lines: "half", bars: "half", blocks: "third" }[kind] ?? "wide");
  new ResizeObserver(() => {
    const now = Math.floor(picture.clientWidth || element.clientWidth);
    if (now !== width) { width = now; draw(); }
  }).observe(element);
  return {
    element,
    show(found) {
      chart = found;
      title.textContent = found.title;
      about.textContent = found.about;
      about.hidden = !found.about;
      body.setAttribute("aria-label", kind === "table" ? found.title : `Data of ${found.title}`);
      // One bar alone leaves half a row empty.
      if (kind === "bars") element.classList.toggle("half", found.bars.length > 1);
      width = width || Math.floor(picture.clientWidth);
      if (kind === "table") width = width || 1;
      draw();
    },
  };
}

/** Columns and rows of any chart. */
function tableOf(chart) {
  if (chart.kind === "table") return { columns: chart.columns, rows: chart.rows };
  if (chart.kind === "lines") {
    return {
      columns: ["series", chart.x.label, chart.y.label],
      rows: chart.series.flatMap((series) => series.points.map(([x, y], index) =>
        [series.names[index] ? `${series.name}: ${series.names[index]}` : series.name, exact(x, chart.x.unit), exact(y, chart.y.unit)])),
    };
  }
  if (chart.kind === "bars") {
    return {
      columns: ["bar", "part", "value"],
      rows: chart.bars.flatMap((bar) => bar.parts.map(([part, value]) => [bar.name, part, quantity(value, chart.unit)])),
    };
  }
  if (chart.kind === "spans") {
    return {
      columns: ["lane", "what", "from", "to"],
      rows: chart.lanes.flatMap(([lane, spans]) => spans.map(([start, end, colour, label]) =>
        [lane, label === chart.colours[colour] ? label : `${chart.colours[colour] ?? ""} ${label}`.trim(), quantity(start, chart.unit), quantity(end, chart.unit)])),
    };
  }
  if (chart.kind === "blocks") {
    return { columns: ["device", "holds"], rows: chart.cells.map((cell) => [cell.device, cell.label]) };
  }
  return { columns: ["step", "what happens"], rows: chart.frames.map((frame, index) => [String(index), frame.says]) };
}

const exact = (value, unit) => (unit || !Number.isInteger(value) ? quantity(value, unit) : String(value));

function table({ columns, rows }) {
  const numeric = columns.map((_, column) => rows.length > 0 && rows.every((row) => /^[-−]?[\d.,]+( ?[a-zA-Z%/]+)?$/.test(row[column] || "0")));
  const kind = (column, text = "") => (numeric[column] ? "number" : text.length > 60 ? "long" : null);
  return h("table", {},
    h("thead", {}, h("tr", {}, columns.map((name, column) => h("th", { scope: "col", class: kind(column) }, name)))),
    h("tbody", {}, rows.slice(0, 2000).map((row) => h("tr", {}, row.map((text, column) => h("td", { class: kind(column, text) }, text))))));
}
