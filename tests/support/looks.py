"""Faults that a page in a browser shows at a glance: a program's word for no value, parts wider than their card."""

from __future__ import annotations

from typing import Any

from tests.support import faces

#: Texts of a page: its text nodes, and the attributes and values that are shown or read out.
_TEXTS = """() => {
  const found = [document.title];
  const texts = document.createTreeWalker(document.documentElement, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    if (!texts.currentNode.parentElement.closest("script, style, noscript")) found.push(texts.currentNode.data);
  }
  for (const each of document.querySelectorAll("*")) {
    for (const name of ["aria-label", "aria-valuetext", "title", "alt", "placeholder", "href"]) {
      if (each.hasAttribute(name)) found.push(each.getAttribute(name));
    }
    if (each.matches("input, textarea, select")) found.push(each.value);
  }
  return found;
}"""
#: Elements that stick out of a card or of what scrolls, and what scrolls sideways and does not say so.
_WIDE = """() => {
  const found = [];
  const name = (each) => `${each.tagName}.${each.getAttribute("class")} ${each.textContent.slice(0, 40)}`;
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) found.push(`the page: ${root.scrollWidth}`);
  const scrolls = (each) => ["auto", "scroll"].includes(getComputedStyle(each).overflowX);
  const holder = (each) => { do each = each.parentElement; while (each && !scrolls(each)); return each; };
  for (const card of document.querySelectorAll(".panel, .figure, section, header, figure, .figures > div, .drop")) {
    const edge = card.getBoundingClientRect();
    if (!edge.width) continue;
    for (const each of card.querySelectorAll("*")) {
      const box = each.getBoundingClientRect();
      const place = holder(each);
      if (!box.width || !box.height || (place && place !== card && card.contains(place))) continue;
      if (box.right > edge.right + 1 || box.left < edge.left - 1) found.push(`out of ${name(card)}: ${name(each)}`);
    }
  }
  for (const each of document.querySelectorAll("main *, header *")) {
    if (!each.clientWidth || each.scrollWidth <= each.clientWidth + 1 || each.closest("svg")) continue;
    // A menu, and fields that one types into, scroll as they do everywhere.
    if (each.matches("nav, input, select, textarea, .unseen")) continue;
    const says = getComputedStyle(each, "::before").content !== "none";
    if (["hidden", "clip"].includes(getComputedStyle(each).overflowX)) found.push(`cut: ${name(each)}`);
    else if (scrolls(each) && !says) found.push(`scrolls and does not say so: ${name(each)}`);
  }
  return [...new Set(found)].slice(0, 5);
}"""


def faults(page: Any) -> list[str]:
    """The faults of a page as it stands."""
    # An observer of sizes speaks before the second frame from now is drawn.
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return faces.nothing("\n".join(page.evaluate(_TEXTS))) + list(page.evaluate(_WIDE))
