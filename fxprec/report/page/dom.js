// How elements are made (text is always set as text), and numbers for people.
const $ = id => document.getElementById(id);
const raw = JSON.parse($("data").textContent);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter(child => child !== null && child !== undefined).map(child => child instanceof Node ? child : String(child)));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const count = n => n === null ? "?" : n.toLocaleString("en");
function scaled(n, base, units) {
  let i = 0;
  while (n >= base && i < units.length - 1) { n /= base; i++; }
  return `${i && n < 100 ? n.toPrecision(3) : Math.round(n)}${units[i]}`;
}
const short = n => n === null ? "?" : scaled(n, 1000, ["", " k", " M", " G", " T", " P"]);
const bytes = n => n === null ? "?" : scaled(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);
const cut = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;

const plain = v => String(+v.toPrecision(6));
const percent = share => `${+(100 * share).toPrecision(3)} %`;
const zip = (xs, ys) => xs.map((x, i) => [x, ys[i]]);
const least = (values, start) => values.reduce((a, b) => Math.min(a, b), start), most = (values, start) => values.reduce((a, b) => Math.max(a, b), start);
