// Tables that sort, filter and show a part of what they have.
const PART = 200;

// columns: [{name, value: row => sort key, show: row => cell, number, wide}]
function table(place, columns, rows, { mark = null } = {}) {
  let shown = PART, order = null, up = false, list = rows;
  const head = el("tr", {}, ...columns.map((column, i) => el("th", { scope: "col", class: column.number ? "number" : null, "aria-sort": "none" },
    el("button", { onclick: () => sort(i) }, column.name))));
  const body = el("tbody"), more = el("button", { onclick: () => { shown += 10 * PART; paint(); } });
  const cell = (column, row) => el("td", { class: column.number ? "number" : column.wide ? "wide" : null }, column.show ? column.show(row) : column.value(row));
  function paint() {
    body.replaceChildren(...list.slice(0, shown).map(row => el("tr", { class: mark?.(row) ? "now" : null }, ...columns.map(column => cell(column, row)))));
    more.textContent = `${count(list.length - shown)} more`;
    more.hidden = list.length <= shown;
  }
  function sort(i) {
    up = order === i ? !up : !columns[i].number;
    order = i;
    [...head.children].forEach((th, j) => th.setAttribute("aria-sort", j !== i ? "none" : up ? "ascending" : "descending"));
    set(list);
  }
  function set(rows) {
    const { value } = columns[order ?? 0];
    list = order === null ? rows : rows.toSorted((a, b) => {
      const [x, y] = up ? [value(a), value(b)] : [value(b), value(a)];
      return typeof x === "string" && typeof y === "string" ? x.localeCompare(y) : (x ?? -Infinity) - (y ?? -Infinity);
    });
    paint();
  }
  place.append(el("thead", {}, head), body);
  place.after(more);
  set(rows);
  return set;
}

function siteTable() {
  return table($("site-table"), [
    { name: "site", value: s => s.id, number: true },
    { name: "tensor", value: s => s.tensor, show: s => s.node ? goTo(s.node, s.tensor) : s.tensor },
    { name: "kind", value: s => s.kind },
    { name: "format", value: s => s.format, show: s => el("span", { class: `format ${s.cls}` }, s.format) },
    { name: "group", value: s => s.group, number: true, show: s => goTo(groups[s.group], String(s.group)) },
    ...(raw.storage === "simulate" ? [] : [{ name: "reads", value: s => s.reads }]),
    { name: "shape", value: s => s.shape }, { name: "elements", value: s => s.elements, show: s => count(s.elements), number: true },
    { name: "module", value: s => s.module }, { name: "source", value: s => s.source },
    { name: "promoted at", value: s => s.promoted, show: s => s.promoted === null ? "" : s.promoted, number: true },
  ], sites);
}

function gemmTable() {
  const gemms = raw.gemms.map(([node, op, module, flops, half, planned, pays, why]) => ({ node: T(node), op: T(op), module: T(module), flops, half, planned, pays, why: T(why) }));
  const asked = gemms.some(g => g.pays !== null || g.why);
  $("gemm-note").textContent = "One forward GEMM a row, its two backward GEMMs cost as much each. FLOP per byte says what limits a GEMM: many, arithmetic; few, memory. "
    + (asked ? "" : "This plan does not say which would pay: no cost model was used.");
  const at = new Map(nodes.filter(n => !n.backward).map(n => [n.name, n]));
  const columns = [
    { name: "GEMM", value: g => g.node, show: g => at.has(g.node) ? goTo(at.get(g.node), g.node) : g.node },
    { name: "operator", value: g => g.op }, { name: "module", value: g => g.module },
    { name: "FLOP", value: g => g.flops, show: g => short(g.flops), number: true },
    { name: "bytes in bf16", value: g => g.half, show: g => bytes(g.half), number: true },
    { name: "as planned", value: g => g.planned, show: g => bytes(g.planned), number: true },
    { name: "FLOP per byte", value: g => g.flops / g.planned, show: g => g.planned && g.flops !== null ? Math.round(g.flops / g.planned) : "?", number: true },
  ];
  if (asked) columns.push({ name: "pays", value: g => String(g.pays), show: g => g.pays === null ? "not estimated" : g.pays ? "yes" : "no" }, { name: "why", value: g => g.why, wide: true });
  table($("gemm-table"), columns, gemms);
}
