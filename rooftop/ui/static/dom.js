// Elements without a framework: h("p", { class: "x" }, "text"), s("rect", { x: 1 }).

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  return append(element, ...children);
}

/** Children that are there: the DOM's own append writes null as the word. */
const present = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== "");

export function append(element, ...children) {
  element.append(...present(children));
  return element;
}

/** Children in the place of those that an element has. */
export function replace(element, ...children) {
  element.replaceChildren(...present(children));
  return element;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

/** Copies a text, and says so on the button. */
export async function copied(button, text) {
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select it"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

/** A number as an axis or a table shows it: three digits, an SI prefix, its unit. */
export function quantity(value, unit = "") {
  if (typeof value !== "number") return String(value ?? "");
  if (unit === "%") return `${digits(value * 100)} %`;
  if (unit === "s") {
    for (const [scale, name] of [[86400 * 2, "days"], [1, "s"], [1e-3, "ms"], [1e-6, "us"]]) {
      if (Math.abs(value) >= scale) return `${digits(name === "days" ? value / 86400 : value / scale)} ${name}`;
    }
    return value === 0 ? "0 s" : `${digits(value / 1e-9)} ns`;
  }
  let size = Math.abs(value);
  let step = 0;
  while (size >= 999.5 && step < PREFIXES.length - 1) { size /= 1000; step += 1; }
  return `${value < 0 ? "-" : ""}${digits(size)} ${PREFIXES[step]}${unit}`.trim();
}

function digits(value) {
  return value === 0 ? "0" : String(Number(value.toPrecision(3)));
}
