// Charts of boxes: bars of parts, timelines of spans, arrays cut over a mesh.

import { h, quantity, s } from "./dom.js";
import { linearTicks } from "./lines.js";

const swatches = (names, used = null) => h("ul", { class: "legend" }, names.map((name, index) => used && !used.has(index) ? null : h("li", {},
  s("svg", { viewBox: "0 0 12 10", "aria-hidden": "true" }, s("rect", { class: `f${index % 8}`, x: 0, y: 0, width: 10, height: 10, rx: 2 })), name)));

export function drawBars(chart, width) {
  const names = [...new Set(chart.bars.flatMap((bar) => bar.parts.filter(([, value]) => value > 0).map(([part]) => part)))];
  const total = (bar) => bar.parts.reduce((sum, [, value]) => sum + value, 0);
  const most = Math.max(...chart.bars.map(total), chart.limit?.[0] ?? 0, 1e-300);
  // Many bars stand beside their names, few below them.
  const beside = chart.bars.length > 6;
  const left = beside ? Math.min(width * 0.42, 9 + 6.3 * Math.max(...chart.bars.map((bar) => bar.name.length))) : 0;
  const right = width - left - 78;
  const row = beside ? 23 : 40;
  const low = beside ? 3 : 17;
  const height = chart.bars.length * row + (chart.limit ? 22 : 6);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title}. ${chart.about}` });
  chart.bars.forEach((bar, index) => {
    const top = index * row;
    let at = left;
    svg.append(s("text", { class: "ink", x: 0, y: top + (beside ? 14 : 12) }, beside ? cut(bar.name, left / 6.3) : bar.name));
    bar.parts.forEach(([part, value]) => {
      const span = (right * value) / most;
      if (span > 0) {
        svg.append(s("rect", { class: `f${names.indexOf(part) % 8}`, x: at, y: top + low, width: Math.max(span - 1, 0.6), height: 13, rx: 2 },
          s("title", {}, `${part}: ${quantity(value, chart.unit)}`)));
      }
      at += span;
    });
    svg.append(s("text", { class: "strong", x: at + 6, y: top + low + 11 }, bar.note || quantity(total(bar), chart.unit)));
  });
  if (chart.limit) {
    const at = left + (right * chart.limit[0]) / most;
    const bottom = chart.bars.length * row;
    svg.append(s("line", { class: "markline", x1: at, x2: at, y1: 14, y2: bottom }),
      s("text", { x: at, y: bottom + 14, "text-anchor": at > width * 0.6 ? "end" : "middle" }, `${chart.limit[1]} ${quantity(chart.limit[0], chart.unit)}`));
  }
  return [names.length > 1 ? swatches(names) : null, svg].filter(Boolean);
}

export function drawSpans(chart, width) {
  const longest = Math.max(...chart.lanes.map(([name]) => name.length));
  const left = Math.min(width * 0.34, Math.max(30, longest * 6.4 + 12));
  const end = Math.max(...chart.lanes.flatMap(([, spans]) => spans.map((span) => span[1])), 1e-300);
  const row = chart.lanes.length > 10 ? 22 : 28;
  const height = chart.lanes.length * row + 24;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title}. ${chart.about}` });
  const x = (value) => left + ((width - left - 2) * value) / end;
  chart.lanes.forEach(([name, spans], lane) => {
    const top = lane * row;
    svg.append(s("text", { class: "ink", x: left - 8, y: top + row / 2 + 2, "text-anchor": "end" }, cut(name, (left - 8) / 6)),
      s("rect", { class: "empty", x: left, y: top + 2, width: width - left - 2, height: row - 5, rx: 2 }));
    for (const [from, to, colour, label] of spans) {
      const span = x(to) - x(from);
      svg.append(s("rect", { class: `f${colour % 8}`, x: x(from), y: top + 2, width: Math.max(span - (span > 3 ? 1 : 0), 0.5), height: row - 5, rx: span > 6 ? 2 : 0 },
        s("title", {}, `${chart.colours[colour]} ${label}: ${quantity(from, chart.unit)} to ${quantity(to, chart.unit)}`)));
      if (span > label.length * 6.5 + 3) {
        svg.append(s("text", { class: "on", x: x(from) + span / 2, y: top + row / 2 + 3, "text-anchor": "middle" }, label));
      }
    }
  });
  for (const tick of linearTicks(0, end, Math.max(2, (width - left) / 110))) {
    const anchor = tick === 0 ? "start" : x(tick) > width - 30 ? "end" : "middle";
    svg.append(s("line", { class: "base", x1: x(tick), x2: x(tick), y1: height - 22, y2: height - 18 }),
      s("text", { x: x(tick), y: height - 5, "text-anchor": anchor }, quantity(tick, chart.unit)));
  }
  return [swatches(chart.colours, new Set(chart.lanes.flatMap(([, spans]) => spans.map((span) => span[2])))), svg];
}

const cut = (text, room) => (text.length > room ? `${text.slice(0, Math.max(1, Math.floor(room) - 1))}…` : text);

/** A cell for every device: the whole array as an outline, the part that it holds filled. */
export function drawBlocks(chart, width) {
  const [rows, columns] = chart.shape;
  const left = 26;
  const gap = columns > 4 ? 5 : 9;
  const room = (width - left - gap * (columns - 1)) / columns;
  const size = Math.max(16, Math.min(92, room));
  const text = size > 46 ? 16 : 0;
  const height = 18 + rows * (size * 0.72 + text + gap);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${chart.title}. ${chart.about}` });
  if (chart.axes[1]) svg.append(s("text", { x: left, y: 11 }, `${chart.axes[1]} →`));
  if (chart.axes[0]) svg.append(s("text", { x: 0, y: 32 }, `${chart.axes[0]} ↓`));
  for (const cell of chart.cells) {
    const x = left + cell.place[1] * (size + gap);
    const y = 18 + cell.place[0] * (size * 0.72 + text + gap);
    const tall = size * 0.72;
    const group = s("g", {}, s("title", {}, `${cell.device}: ${cell.label}`),
      s("rect", { class: "empty", x, y, width: size, height: tall, rx: 2 }),
      s("rect", { class: `f${cell.block % 8} t${Math.floor(cell.block / 8) % 4}`, x: x + size * cell.columns[0], y: y + tall * cell.rows[0],
        width: size * (cell.columns[1] - cell.columns[0]), height: tall * (cell.rows[1] - cell.rows[0]), rx: 1 }),
      s("rect", { class: "frame", x, y, width: size, height: tall, rx: 2 }));
    if (text) group.append(s("text", { x: x + size / 2, y: y + tall + 13, "text-anchor": "middle" }, cell.device));
    svg.append(group);
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return [svg];
}
