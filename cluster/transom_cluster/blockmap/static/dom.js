/** Makes elements: text only ever goes in as text, so that no request id can become markup. */

/** `element("td", {class: "number"}, "12")`; functions among the attributes are event listeners. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Set text only where it differs: writing it costs a layout. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
