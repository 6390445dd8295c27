"use strict";
// The figures of marks, by mouse, touch and keyboard; zoom of timelines. Drawings come from Python as SVG.
// `rooftopCharts(root)` prepares the drawings below an element; a page that is a file prepares itself.
globalThis.rooftopCharts = (() => {
  const texts = new WeakMap();
  const redraw = new WeakMap();
  let tip = null;

  function show(mark, x, y) {
    tip ??= document.getElementById("tip");
    tip.textContent = texts.get(mark) ?? "";
    tip.hidden = false;
    const room = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - room.width - 8))}px`;
    tip.style.top = `${y + 18 + room.height > innerHeight ? Math.max(4, y - room.height - 10) : y + 18}px`;
  }
  const hide = () => { if (tip) tip.hidden = true; };
  const middle = (mark) => {
    const box = mark.getBoundingClientRect();
    return [box.left + box.width / 2, box.top + box.height / 2];
  };
  const focused = () => document.activeElement?.matches?.(".mark") && texts.has(document.activeElement) ? document.activeElement : null;

  // A finger taps and does not move.
  for (const name of ["pointermove", "pointerdown"]) {
    document.addEventListener(name, (event) => {
      const mark = event.target.closest?.("svg.plot .mark");
      if (mark) show(mark, event.clientX, event.clientY);
      else if (!focused()) hide();
    });
  }
  // Going to a mark may scroll to it: its figures go along.
  addEventListener("scroll", () => {
    if (focused()) show(focused(), ...middle(focused()));
    else hide();
  }, { passive: true, capture: true });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });

  /** The mark that an arrow key leads to: the next one, or with up and down the same place of another series. */
  function next(marks, at, key) {
    if (key === "Home") return 0;
    if (key === "End") return marks.length - 1;
    return { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1 }[key];
  }

  function keys(plot) {
    plot.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { plot.focus(); hide(); return; }
      if (redraw.has(plot) && redraw.get(plot)(event.key)) { event.preventDefault(); return; }
      const marks = [...plot.querySelectorAll(".mark")].filter((mark) => mark.style.display !== "none");
      const at = next(marks, marks.indexOf(document.activeElement), event.key);
      if (at === undefined || !marks.length) return;
      event.preventDefault();
      const mark = marks[Math.max(0, Math.min(at, marks.length - 1))];
      mark.setAttribute("tabindex", "-1");
      mark.focus({ preventScroll: false });
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
    const step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => (high - low) / size <= 8) || high - low;
    const values = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) values.push(at);
    return values;
  };

  function zoom(plot) {
    const total = +plot.dataset.total, left = +plot.dataset.left;
    const { width: whole, height } = plot.viewBox.baseVal;
    const width = whole - left - 10;
    const bars = [...plot.querySelectorAll(".bars rect")].map((rect) => [rect, +rect.dataset.s, +rect.dataset.e]);
    const axis = plot.querySelector(".ticks");
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
        text.setAttribute("text-anchor", x < whole - 36 ? "middle" : "end");
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
    const buttons = plot.parentNode.querySelector(".zoom");
    buttons.hidden = false;
    buttons.addEventListener("click", (event) => {
      const how = event.target.dataset.zoom;
      if (how) move(how);
    });
    const moves = { "+": "in", "=": "in", "-": "out", "0": "all", ",": "left", ".": "right" };
    redraw.set(plot, (key) => { if (moves[key]) move(moves[key]); return key in moves; });
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      move(event.deltaY < 0 ? "in" : "out");
    }, { passive: false });
  }

  // What is wider than its place says so, in words too.
  const cut = (place) => place.classList.toggle("cut", place.scrollWidth > place.clientWidth + 1);
  const cuts = new ResizeObserver((entries) => { for (const { target } of entries) cut(target); });

  return (root) => {
    for (const mark of root.querySelectorAll("svg.plot .mark")) {
      // A title shows by itself where scripts do not run.
      const title = mark.querySelector(":scope > title");
      if (!title) continue;
      texts.set(mark, title.textContent);
      mark.setAttribute("aria-label", title.textContent.replaceAll("\n", "; "));
      title.remove();
    }
    for (const place of root.querySelectorAll(".scroll, .stage")) cuts.observe(place);
    root.querySelectorAll("svg.plot").forEach(keys);
    root.querySelectorAll("svg.timeline").forEach(zoom);
  };
})();
if (document.body && document.getElementById("tip")?.dataset.page === "file") rooftopCharts(document);
