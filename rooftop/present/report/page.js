"use strict";
(() => {
  // What a mark tells stands in its title, which shows by itself where scripts do not run.
  const tip = document.getElementById("tip");
  const told = new WeakMap();
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector("title");
    told.set(mark, title.textContent);
    mark.setAttribute("aria-label", title.textContent.replaceAll("\n", "; "));
    title.remove();
  }
  const show = (mark, x, y) => {
    tip.textContent = told.get(mark);
    tip.hidden = false;
    const room = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - room.width - 8))}px`;
    tip.style.top = `${y + 18 + room.height > innerHeight ? Math.max(4, y - room.height - 10) : y + 18}px`;
  };
  const hide = () => { tip.hidden = true; };
  const middle = (mark) => {
    const box = mark.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  };
  const focused = () => document.activeElement && document.activeElement.matches(".mark") ? document.activeElement : null;
  const point = (event) => {
    const mark = event.target.closest ? event.target.closest(".mark") : null;
    if (mark) show(mark, event.clientX, event.clientY);
    else if (!focused()) hide();
  };
  // A finger taps and does not move.
  for (const each of ["pointermove", "pointerdown"]) document.addEventListener(each, point);
  // Going to a mark may scroll to it: what it tells goes along.
  addEventListener("scroll", () => {
    if (focused()) show(focused(), ...middle(focused()));
    else hide();
  }, {passive: true, capture: true});

  const redraw = new Map();
  for (const plot of document.querySelectorAll("svg.plot")) {
    plot.addEventListener("keydown", (event) => {
      const marks = [...plot.querySelectorAll(".mark")].filter((mark) => mark.style.display !== "none");
      const at = marks.indexOf(document.activeElement);
      const next = {ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0,
        End: marks.length - 1}[event.key];
      if (event.key === "Escape") { plot.focus(); hide(); return; }
      if (redraw.has(plot) && redraw.get(plot)(event.key)) { event.preventDefault(); return; }
      if (next === undefined || !marks.length) return;
      event.preventDefault();
      const mark = marks[Math.max(0, Math.min(next, marks.length - 1))];
      mark.setAttribute("tabindex", "-1");
      mark.focus({preventScroll: false});
      show(mark, ...middle(mark));
    });
    plot.addEventListener("focusout", hide);
  }

  const seconds = (value) => {
    if (value === 0) return "0";
    for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
      if (Math.abs(value) >= scale * 0.9995) return `${+(value / scale).toPrecision(6)} ${unit}`;
    }
    return `${+(value / 1e-9).toPrecision(4)} ns`;
  };
  const ticks = (low, high) => {
    const power = 10 ** Math.floor(Math.log10((high - low) / 8));
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((one) => (high - low) / one <= 8) || high - low;
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
    return found;
  };
  for (const plot of document.querySelectorAll("svg.timeline")) {
    const total = +plot.dataset.total, left = +plot.dataset.left, width = 860 - left - 10;
    const bars = [...plot.querySelectorAll(".bars rect")].map((rect) => [rect, +rect.dataset.s, +rect.dataset.e]);
    const axis = plot.querySelector(".ticks"), height = +plot.viewBox.baseVal.height;
    let low = 0, high = total;
    const draw = () => {
      const scale = width / (high - low);
      for (const [rect, start, end] of bars) {
        const seen = end > low && start < high;
        rect.parentNode.style.display = seen ? "" : "none";
        if (!seen) continue;
        const from = Math.max(start, low), to = Math.min(end, high);
        rect.setAttribute("x", (left + (from - low) * scale).toFixed(2));
        rect.setAttribute("width", Math.max((to - from) * scale, 0.4).toFixed(2));
      }
      axis.replaceChildren();
      for (const at of ticks(low, high)) {
        const x = left + (at - low) * scale;
        const line = document.createElementNS(plot.namespaceURI, "line");
        for (const [name, value] of [["x1", x], ["x2", x], ["y1", 10], ["y2", height - 28]]) line.setAttribute(name, value);
        line.setAttribute("class", "grid");
        const text = document.createElementNS(plot.namespaceURI, "text");
        text.setAttribute("x", x);
        text.setAttribute("y", height - 10);
        text.setAttribute("text-anchor", x < 824 ? "middle" : "end");
        text.textContent = seconds(at);
        axis.append(line, text);
      }
    };
    const move = (how) => {
      const span = high - low, center = (low + high) / 2;
      const wide = how === "in" ? span / 2 : how === "out" ? Math.min(span * 2, total) : how === "all" ? total : span;
      const shift = how === "left" ? -span / 2 : how === "right" ? span / 2 : 0;
      low = Math.max(0, Math.min((how === "in" && low === 0 ? wide / 2 : center) + shift - wide / 2, total - wide));
      high = low + Math.max(wide, total * 1e-6);
      hide();
      draw();
    };
    const figure = plot.closest("figure");
    const controls = figure.querySelector(".controls");
    controls.hidden = false;
    controls.addEventListener("click", (event) => {
      const how = event.target.dataset.zoom;
      if (how) move(how);
    });
    const keys = {"+": "in", "=": "in", "-": "out", "0": "all", ",": "left", ".": "right"};
    redraw.set(plot, (key) => { if (keys[key]) move(keys[key]); return key in keys; });
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      move(event.deltaY < 0 ? "in" : "out");
    }, {passive: false});
  }
  addEventListener("beforeprint", () => {
    for (const each of document.querySelectorAll("details")) each.open = true;
  });
})();
