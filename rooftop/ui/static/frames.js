// Animations: frames over a grid of cells, with a play button and a slider. Nothing moves until it is asked to.

import { append, h, replace, s } from "./dom.js";

export function framesPlayer(place) {
  const picture = h("div", { class: "stage" });
  const says = h("p", { class: "says", role: "status", "aria-live": "polite" });
  const range = h("input", { type: "range", min: 0, value: 0, "aria-label": "Step of the animation" });
  const output = h("output", {});
  const play = h("button", { type: "button" }, "Play");
  let chart = null;
  let width = 0;
  let timer = 0;
  let shown = "";

  function draw() {
    const frame = chart.frames[Number(range.value)];
    replace(picture, gridOf(chart, frame, width));
    // What is wider than its place is scrolled by keyboard too.
    const wider = picture.scrollWidth > picture.clientWidth;
    for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", chart.title]]) {
      if (wider) picture.setAttribute(name, value); else picture.removeAttribute(name);
    }
    says.textContent = frame.says;
    output.textContent = `${range.value} of ${chart.frames.length - 1}`;
    range.setAttribute("aria-valuetext", `${range.value}: ${frame.says}`);
  }
  function stop() { clearInterval(timer); timer = 0; play.textContent = "Play"; }
  function step() {
    if (Number(range.value) >= chart.frames.length - 1) { stop(); return; }
    range.value = Number(range.value) + 1;
    draw();
  }
  play.addEventListener("click", () => {
    if (timer) { stop(); return; }
    if (Number(range.value) >= chart.frames.length - 1) range.value = 0;
    play.textContent = "Pause";
    timer = setInterval(step, Math.max(120, Math.min(700, 9000 / chart.frames.length)));
    draw();
  });
  range.addEventListener("input", () => { stop(); draw(); });
  append(place, picture, says, h("div", { class: "player" }, play, range, output));
  return {
    show(found, wide) {
      const same = JSON.stringify([found.shape, found.frames.length, found.names]);
      if (same !== shown) { stop(); range.max = found.frames.length - 1; range.value = found.start; shown = same; }
      chart = found;
      width = wide;
      draw();
    },
  };
}

/** Cells of a frame: what each holds as small squares, a text, and arrows between cells. */
function gridOf(chart, frame, width) {
  const [rows, columns] = chart.shape;
  const many = Math.max(...frame.cells.map((cell) => cell.parts.length));
  const gap = frame.arrows ? 18 : 5;
  const least = many > 1 ? 34 : 20;
  const size = Math.max(least, Math.min(many > 1 ? 76 : 54, (width - gap * (columns + 1)) / columns));
  const names = rows === 1 ? 16 : 0;
  const wide = Math.max(width, columns * (size + gap) + gap);
  const height = rows * (size + gap) + names + (rows > 1 && frame.arrows ? gap : 0);
  const left = (wide - (columns * (size + gap) - gap)) / 2;
  const top = rows > 1 && frame.arrows ? gap : 4;
  const at = (index) => [left + (index % columns) * (size + gap), top + Math.floor(index / columns) * (size + gap)];
  const svg = s("svg", { viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": `${chart.title}: ${frame.says}` });
  svg.style.width = `${wide}px`;
  frame.cells.forEach((cell, index) => append(svg, cellOf(cell, ...at(index), size, names ? chart.names[index] : "")));
  for (const [from, to] of frame.arrows ?? []) append(svg, arrowOf(at(from), at(to), size, gap));
  return svg;
}

function cellOf(cell, x, y, size, name) {
  const group = s("g", {}, s("rect", { class: "empty", x, y, width: size, height: size, rx: 4 }));
  const across = Math.ceil(Math.sqrt(cell.parts.length));
  const down = Math.ceil(cell.parts.length / across);
  const [wide, tall] = [(size - 4) / across, (size - 4) / down];
  cell.parts.forEach(([colour, amount], part) => {
    if (amount <= 0) return;
    const [px, py] = [x + 2 + (part % across) * wide, y + 2 + Math.floor(part / across) * tall];
    append(group, s("rect", { class: `f${colour % 8} t${Math.floor(colour / 8) % 2}`, x: px, y: py + tall * (1 - amount), width: Math.max(1, wide - (across > 1 ? 1 : 0)),
      height: Math.max(1, tall * amount - (down > 1 ? 1 : 0)), rx: across > 1 ? 1 : 3 }));
  });
  append(group, s("rect", { class: "frame", x, y, width: size, height: size, rx: 4 }));
  if (cell.text) {
    const full = cell.parts.length === 1 && cell.parts[0][1] > 0.6;
    append(group, s("text", { class: full ? "on" : "ink", x: x + size / 2, y: y + size / 2 + 4, "text-anchor": "middle" }, cell.text));
  }
  if (name) append(group, s("text", { x: x + size / 2, y: y + size + 14, "text-anchor": "middle" }, name));
  return group;
}

/** An arrow in the gap beside a cell; one that goes round the back leaves on the far side. */
function arrowOf([ax, ay], [bx, by], size, gap) {
  const down = ax === bx;
  const away = down ? by - ay : bx - ax;
  const way = Math.sign(away) * (Math.abs(away) > size + gap + 1 ? -1 : 1);
  const from = (down ? ay : ax) + (way > 0 ? size + 2 : -2);
  const to = from + way * (gap - 4);
  // The two ways between neighbours keep apart.
  const across = (down ? ax : ay) + size / 2 + 7 * way;
  const point = (along, aside) => (down ? `${aside} ${along}` : `${along} ${aside}`);
  return s("g", {}, s("path", { class: "arrow", d: `M${point(from, across)} ${point(to - way * 4, across)}` }),
    s("path", { class: "arrowhead", d: `M${point(to - way * 6, across - 3.5)} ${point(to, across)} ${point(to - way * 6, across + 3.5)}z` }));
}
