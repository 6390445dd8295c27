// The form of an explorer, built from its declaration. Every value is text, as in the address.

import { append, h, quantity } from "./dom.js";

/** Builds the controls; calls `changed()` on every change. Returns what reads and marks them. */
export function buildForm(declared, values, changed) {
  const fields = new Map();
  /** Controls that do nothing beside the others' values are off; their help says why. */
  const enable = () => {
    for (const { control, input, typed } of fields.values()) {
      if (!control.only) continue;
      const off = fields.get(control.only[0]).get() !== control.only[1];
      for (const part of [input, typed]) if (part) part.disabled = off;
    }
  };
  const change = () => { enable(); changed(); };
  const form = h("form", { class: "controls panel", "aria-label": "Controls", onsubmit: (event) => event.preventDefault() });
  for (const control of declared) {
    const field = (BUILDERS[control.kind] ?? text)(control, values[control.name] ?? control.default, change);
    field.wrong = h("p", { class: "wrong", id: `wrong-${control.name}`, hidden: true });
    fields.set(control.name, { ...field, control });
    append(form, h("div", { class: "control" }, field.parts,
      control.help ? h("p", { class: "help", id: `help-${control.name}` }, control.help) : null, field.wrong));
  }
  const general = h("p", { class: "wrong", role: "alert", hidden: true });
  append(form, general, h("button", { type: "reset", onclick: (event) => {
    event.preventDefault();
    for (const field of fields.values()) field.set(field.control.default);
    change();
  } }, "Reset"));
  enable();
  return {
    form,
    /** name -> text of every control. */
    read: () => Object.fromEntries([...fields].map(([name, field]) =>
      [name, field.input.disabled ? field.control.default : field.get()])),
    /** Shows the one line of an error beside its field; null takes all marks away. */
    mark(error) {
      for (const field of fields.values()) { field.wrong.hidden = true; field.input.removeAttribute("aria-invalid"); }
      general.hidden = true;
      if (!error) return;
      const about = error.field ?? "";
      const owner = [...fields.values()].find(({ control }) => control.fields.includes(about))
        ?? [...fields.values()].find(({ control }) => control.fields.some((name) => about.startsWith(name)));
      const place = owner ? owner.wrong : general;
      place.textContent = error.message;
      place.hidden = false;
      owner?.input.setAttribute("aria-invalid", "true");
    },
  };
}

const described = (control) => `${control.help ? `help-${control.name} ` : ""}wrong-${control.name}`;

function slider(control, value, changed) {
  const { stops } = control;
  const input = h("input", { type: "range", id: `c-${control.name}`, min: 0, max: stops.length - 1, step: 1,
    "aria-describedby": described(control) });
  const typed = h("input", { type: "text", class: "typed", value, "aria-label": `${control.label}, typed`,
    autocomplete: "off", spellcheck: "false" });
  const reads = h("span", { class: "reads", "aria-hidden": "true" });
  const say = () => {
    input.setAttribute("aria-valuetext", `${typed.value} ${control.unit}`.trim());
    // Long rows of digits are hard to read: beside them stands what they come to.
    reads.textContent = /^\d{6,}$/.test(typed.value.trim()) ? quantity(Number(typed.value)) : "";
  };
  const place = (wanted) => {
    const number = parse(wanted);
    let best = 0;
    stops.forEach((stop, index) => {
      if (Math.abs(Math.log(stop / number)) < Math.abs(Math.log(stops[best] / number))) best = index;
    });
    input.value = best;
    say();
  };
  place(value);
  input.addEventListener("input", () => { typed.value = stops[Number(input.value)]; say(); changed(); });
  typed.addEventListener("input", () => { if (parse(typed.value) > 0) place(typed.value); changed(); });
  return {
    parts: [h("div", { class: "head" }, h("label", { for: `c-${control.name}` }, control.label), reads, typed), input],
    input,
    typed,
    get: () => typed.value.trim(),
    set: (wanted) => { typed.value = wanted; place(wanted); },
  };
}

function select(control, value, changed) {
  const input = h("select", { id: `c-${control.name}`, "aria-describedby": described(control), onchange: changed },
    control.options.map((option) => h("option", { value: option }, option)));
  if (!control.options.includes(value)) input.add(h("option", { value }, value), 0);
  input.value = value;
  return { parts: [label(control), input], input, get: () => input.value, set: (wanted) => { input.value = wanted; } };
}

function text(control, value, changed) {
  const list = control.suggestions.length ? `list-${control.name}` : null;
  const input = h("input", { type: "text", id: `c-${control.name}`, list, autocomplete: "off", spellcheck: "false",
    "aria-describedby": described(control), oninput: changed });
  input.value = value;
  const offered = list ? h("datalist", { id: list }, control.suggestions.map((option) => h("option", { value: option }))) : null;
  return { parts: [label(control), input, offered], input, get: () => input.value, set: (wanted) => { input.value = wanted; } };
}

function area(control, value, changed) {
  const input = h("textarea", { id: `c-${control.name}`, spellcheck: "false", "aria-describedby": described(control),
    oninput: changed });
  input.value = value;
  return { parts: [label(control), input], input, get: () => input.value, set: (wanted) => { input.value = wanted; } };
}

const label = (control) => h("label", { for: `c-${control.name}` }, control.label);
const BUILDERS = { slider, select, text, area };
const SUFFIX = { "": 1, k: 1e3, m: 1e6, g: 1e9, b: 1e9, t: 1e12, p: 1e15, ki: 2 ** 10, mi: 2 ** 20, gi: 2 ** 30, ti: 2 ** 40 };

/** About where a quantity lies, to put the thumb there; the server is the one that reads it. */
function parse(wanted) {
  const match = /^\s*([0-9.]+)\s*([a-z]*)\s*$/i.exec(wanted);
  return match ? Number(match[1]) * (SUFFIX[match[2].toLowerCase()] ?? NaN) : NaN;
}
