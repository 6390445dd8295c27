// Series over two axes, each linear or logarithmic; pointer and arrow keys read points.

import { h, quantity, s } from "./dom.js";

const EDGE = { top: 14, right: 14, bottom: 40, left: 58 };

export function drawLines(chart, width, element) {
  const height = Math.round(Math.min(340, Math.max(230, width * 0.58)));
  const inner = { left: EDGE.left, right: width - EDGE.right, top: EDGE.top, bottom: height - EDGE.bottom };
  const points = chart.series.flatMap((series) => series.points);
  if (!points.length) return [h("p", { class: "about" }, "There is nothing to show.")];
  const x = scale(points.map((point) => point[0]), chart.x, inner.left, inner.right);
  const y = scale(points.map((point) => point[1]), chart.y, inner.bottom, inner.top);
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${chart.title}. ${chart.about} Arrow keys read the points.` });
  const fewer = Math.max(3, Math.floor((inner.right - inner.left) / 62));
  for (const tick of y.ticks(6)) {
    svg.append(s("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(tick), y2: y(tick) }),
      s("text", { x: inner.left - 7, y: y(tick) + 4, "text-anchor": "end" }, quantity(tick, short(chart.y.unit))));
  }
  for (const tick of x.ticks(fewer)) {
    svg.append(s("line", { class: "grid", x1: x(tick), x2: x(tick), y1: inner.top, y2: inner.bottom }),
      s("text", { x: x(tick), y: inner.bottom + 16, "text-anchor": "middle" }, quantity(tick, short(chart.x.unit))));
  }
  svg.append(s("line", { class: "base", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }),
    s("text", { x: (inner.left + inner.right) / 2, y: height - 5, "text-anchor": "middle" }, labelled(chart.x)),
    s("text", { x: 3, y: 8, "text-anchor": "start" }, labelled(chart.y)));
  for (const [at, what] of chart.marks) {
    if (at < x.low || at > x.high) continue;
    const left = x(at) > width * 0.72;
    svg.append(s("line", { class: "markline", x1: x(at), x2: x(at), y1: inner.top, y2: inner.bottom }),
      s("text", { x: x(at) + (left ? -5 : 5), y: inner.bottom - 7, "text-anchor": left ? "end" : "start" }, what));
  }
  chart.series.forEach((series, index) => {
    const colour = index % 8;
    const placed = series.points.map(([px, py]) => [x(px), y(py)]);
    if (series.style === "line" || series.style === "dashed") {
      svg.append(s("polyline", { class: `series ${series.style} s${colour}`, points: placed.map((p) => p.map((n) => n.toFixed(1)).join(",")).join(" ") }));
    }
    if (series.style === "dots") placed.forEach(([cx, cy]) => svg.append(s("circle", { class: `dot f${colour}`, cx, cy, r: 3 })));
  });
  chart.series.forEach((series, index) => {
    if (series.style !== "point") return;
    series.points.forEach(([px, py]) => svg.append(s("circle", { class: `halo f${index % 8}`, cx: x(px), cy: y(py), r: 7 })));
  });
  const cursor = s("circle", { class: "cursor", r: 6, visibility: "hidden" });
  svg.append(cursor);
  const tip = h("div", { class: "tip", hidden: true, role: "status" });
  read(chart, svg, cursor, tip, x, y, element, width);
  return [legend(chart.series), svg, tip];
}

/** What an axis counts, with its unit where ticks have no room for it. */
const labelled = ({ label, unit }) => (!unit || short(unit) || label.includes(unit) ? label : `${label}, ${unit}`);
const short = (unit) => (unit === "s" || unit === "%" ? unit : unit === "B" ? "B" : "");

function legend(series) {
  return h("ul", { class: "legend" }, series.map((each, index) => h("li", {},
    s("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" }, each.style === "line" || each.style === "dashed"
      ? s("line", { class: `series ${each.style} s${index % 8}`, x1: 1, x2: 19, y1: 5, y2: 5 })
      : s("circle", { class: `f${index % 8}`, cx: 10, cy: 5, r: each.style === "point" ? 4.5 : 3 })), each.name)));
}

/** Reading points: the nearest to the pointer, or the one that the arrow keys have come to. */
function read(chart, svg, cursor, tip, x, y, element, width) {
  let line = Math.max(0, chart.series.findIndex((series) => series.style === "point"));
  let at = 0;
  function show() {
    const series = chart.series[line];
    const [px, py] = series.points[at];
    cursor.setAttribute("cx", x(px));
    cursor.setAttribute("cy", y(py));
    cursor.setAttribute("visibility", "visible");
    const named = series.names[at] ? `, ${series.names[at]}` : "";
    tip.textContent = `${series.name}${named}: ${quantity(py, chart.y.unit)} at ${quantity(px, chart.x.unit)}`;
    tip.hidden = false;
    const box = svg.getBoundingClientRect();
    const outer = element.getBoundingClientRect();
    const left = box.left - outer.left + x(px);
    tip.style.left = `${Math.max(4, Math.min(left + 12, width - tip.offsetWidth))}px`;
    tip.style.top = `${box.top - outer.top + y(py) - tip.offsetHeight - 10}px`;
  }
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    let best = Infinity;
    chart.series.forEach((series, which) => series.points.forEach(([px, py], index) => {
      const away = Math.hypot(x(px) - (event.clientX - box.left), (y(py) - (event.clientY - box.top)) * 0.8);
      if (away < best) { best = away; line = which; at = index; }
    }));
    if (best < 60) show(); else hide();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const count = chart.series[line].points.length;
    if (event.key === "ArrowRight") at = Math.min(count - 1, at + 1);
    else if (event.key === "ArrowLeft") at = Math.max(0, at - 1);
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const next = (line + (event.key === "ArrowDown" ? 1 : -1) + chart.series.length) % chart.series.length;
      at = Math.min(at, chart.series[next].points.length - 1);
      line = next;
    } else if (event.key === "Escape") { hide(); return; } else return;
    event.preventDefault();
    show();
  });
}

function scale(values, axis, from, to) {
  const finite = values.filter((value) => Number.isFinite(value) && (axis.scale !== "log" || value > 0));
  let low = Math.min(...finite);
  let high = Math.max(...finite);
  const log = axis.scale === "log";
  if (log) {
    if (low === high) { low /= 2; high *= 2; }
    high *= (high / low) ** 0.04;
    const place = (value) => from + ((to - from) * Math.log(Math.max(value, low) / low)) / Math.log(high / low);
    return Object.assign(place, { low, high, ticks: (count) => logTicks(low, high, count) });
  }
  if (axis.zero) low = Math.min(0, low);
  if (low === high) high = low + 1;
  if (!axis.zero) low -= (high - low) * 0.06;
  high += (high - low) * 0.06;
  const place = (value) => from + ((to - from) * (value - low)) / (high - low);
  const whole = !axis.unit && values.every(Number.isInteger);
  return Object.assign(place, { low, high, ticks: (count) => linearTicks(low, high, count, whole) });
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  for (const digits of [[1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9], [1, 1.5, 2, 3, 5, 7], [1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = first; power <= last; power += 1) for (const digit of digits) found.push(digit * 10 ** power);
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high);
    if (inside.length <= count) return inside;
  }
  const every = Math.ceil((last - first) / count);
  const found = [];
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found.filter((tick) => tick >= low * 0.999 && tick <= high);
}

/** Round numbers between two: at most about so many, whole ones if asked for. */
export function linearTicks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / count, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (whole && power === 1 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((digit) => digit * power).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) found.push(Math.abs(tick) < step / 1e6 ? 0 : tick);
  return found;
}
