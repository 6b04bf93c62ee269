// The heat map and the ranking: tables that sort, filter and show a part of what they have.
const number = v => typeof v === "string" || v === null ? v ?? "" : String(+v.toPrecision(2));
const shade = v => raw.shades.filter(limit => +v >= limit).length;
const heat = table($("heat-table"), [
  { name: "module", value: row => row.module },
  ...["as planned", ...raw.formats].map((name, i) => ({ name, number: true, value: row => +row.damages[i], show: row => el("span", { class: `h${shade(row.damages[i])}` }, number(row.damages[i])) })),
], raw.heat);
const ranking = table($("ranking-table"), [
  { name: "tensor", value: row => row.tensor }, { name: "module", value: row => row.module }, { name: "source", value: row => row.source }, { name: "format", value: row => row.format },
  ...["damage", "error", "overflow", "underflow", "zeros"].map(name => ({ name, number: true, value: row => +row[name], show: row => number(row[name]) })),
  { name: "why", value: row => row.why },
], raw.ranking);
$("search").addEventListener("input", () => {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), has = texts => words.every(w => texts.some(text => text.toLowerCase().includes(w)));
  const rows = raw.ranking.filter(row => has([row.tensor, row.module, row.source, row.format, row.why]));
  ranking(rows);
  heat(raw.heat.filter(row => has([row.module]) || rows.some(other => other.module === row.module)));
  $("found").textContent = words.length ? `${count(rows.length)} of ${count(raw.ranking.length)} tensors` : "";
});
$("search").addEventListener("keydown", event => { if (event.key === "Escape") { $("search").value = ""; $("search").dispatchEvent(new Event("input")); } });
document.addEventListener("keydown", event => {
  if (event.key === "/" && !["INPUT", "TEXTAREA"].includes(document.activeElement.tagName)) { event.preventDefault(); $("search").focus(); }
});
