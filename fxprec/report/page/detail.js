// What is known of the selected group or node, beside the graph.
function facts(pairs) {
  return el("dl", {}, ...pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
const goTo = (thing, text) => el("button", { class: "link", onclick: () => { select(thing); $("graph").scrollIntoView({ block: "nearest" }); } }, text);
const histories = new Map();  // site -> its series
for (const series of raw.history) histories.set(series.site, [...(histories.get(series.site) ?? []), series]);

function showDetail(thing) {
  const parts = thing === null ? [el("p", { class: "hint" }, "Click a group or a tensor.")] : thing.group === undefined ? groupDetail(thing) : nodeDetail(thing);
  $("detail").replaceChildren(...parts);
}
function groupDetail(group) {
  return [
    el("h3", {}, `group ${group.id}: ${group.low ? "low" : "high"}`),
    facts([
      ["opens at", group.module], ["elements", count(group.elements)], ["order", `${group.order + 1} of ${groups.length}`],
      ["saved", group.savedBytes === null ? "" : `${bytes(group.savedBytes)} (fp32 ${bytes(4 * group.savedElements)})`],
      ["nodes", `${group.nodes.length}, ${group.sites.length} stored in a chosen format`], ["operators", cut(group.operators, 600)],
    ]),
    el("button", { onclick: () => toggle(group) }, open.has(group.id) ? "Close" : "Open"),
  ];
}
function nodeDetail(node) {
  return [
    el("h3", {}, node.name),
    facts([
      ["operator", node.op], ["module", node.module], ["source", node.source], ["value", node.value], ["elements", node.elements ? count(node.elements) : ""],
      ["half", node.backward ? "backward" : "forward"], ["saved", node.saved ? "for backward" : ""], ["group", goTo(groups[node.group], String(node.group))],
    ]),
    ...(node.sites.length ? node.sites.flatMap(site => siteDetail(site, node)) : [el("p", { class: "hint" }, "Not stored in a chosen format: it stays in registers, or in its own dtype.")]),
  ];
}
function siteDetail(site, node) {
  const other = site.tensor !== node.name;  // a gradient bears the name of its value
  return [
    el("h3", {}, `site ${site.id}: `, el("span", { class: `format ${site.cls}` }, site.format)),
    facts([
      ["kind", site.kind], ["reads", raw.storage === "simulate" ? "" : site.reads],
      ...(other ? [["tensor", site.tensor], ["shape", site.shape], ["module", site.module], ["source", site.source]] : []),
      ["promoted", site.promoted === null ? "" : `at step ${site.promoted}`],
    ]),
    ...site.why.split("\n").map(why => el("p", { class: "hint" }, why)),
    ...(histories.get(site.id) ?? []).flatMap(history => seriesCharts(history)),
  ];
}
function seriesCharts(history) {
  const label = history.row === history.site ? "" : `row ${history.row}, `, { steps } = history;
  const magnitudes = [{ points: zip(steps, history.amax), cls: "b8", name: "largest magnitude" }];
  if (history.scale) magnitudes.push({ points: zip(steps, history.scale), cls: "b16", name: "scale" });
  return [
    chart(magnitudes, { caption: `${label}exponent of 2 by step`, zero: false }),
    chart([{ points: zip(steps, history.overflow), cls: "b32", name: "overflow" }, { points: zip(steps, history.underflow), cls: "b8", name: "underflow" }], { caption: `${label}share of elements by step`, y: percent }),
  ];
}
