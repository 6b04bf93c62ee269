// The data, decoded.
const T = i => raw.texts[i];
const width = bits => bits === undefined ? "b0" : bits <= 8 ? "b8" : bits <= 16 ? "b16" : "b32";

const sites = raw.sites.map(([tensor, kind, module, source, shape, group, format, promoted, elements, why, reads], id) => ({
  id, tensor: T(tensor), kind: T(kind), module: T(module), source: T(source), shape: T(shape), group, format: T(format),
  promoted, elements, why: T(why), reads: T(reads), cls: width(raw.bits[T(format)]),
}));
const groups = raw.groups.map(([id, low, order, elements, savedElements, savedBytes, operators]) => ({
  id, low: !!low, order, elements, savedElements, savedBytes, operators: T(operators), nodes: [], sites: [], parts: {},
}));
for (const site of sites) {
  const group = groups[site.group];
  group.sites.push(site);
  group.parts[site.cls] = (group.parts[site.cls] ?? 0) + site.elements;
}
for (const group of groups) {
  const known = Object.values(group.parts).reduce((a, b) => a + b, 0);
  if (group.elements > known) group.parts.b0 = group.elements - known;
  const opens = raw.gemms.find(gemm => gemm[9] === group.id);
  group.module = group.id && opens ? T(opens[2]) : commonModule(group.sites.map(site => site.module).filter(Boolean));
}

// Without graph.json there are no edges, and each site is drawn as a node.
const nodes = raw.nodes
  ? raw.nodes.map(([name, op, module, source, value, group, backward, elements, saved, ids], id) => ({
      id, name: T(name), op: T(op), module: T(module), source: T(source), value: T(value), group, backward: !!backward,
      elements, saved: !!saved, sites: ids.map(i => sites[i]), cls: ids.length ? sites[ids[0]].cls : "b0", to: [], from: [],
    }))
  : sites.map(site => ({
      id: site.id, name: site.tensor, op: site.kind, module: site.module, source: site.source, value: site.shape, group: site.group,
      backward: site.kind.startsWith("grad"), elements: site.elements, saved: false, sites: [site], cls: site.cls, to: [], from: [],
    }));
for (const node of nodes) {
  groups[node.group].nodes.push(node);
  for (const site of node.sites) site.node ??= node;
}
for (let i = 0; i < raw.edges.length; i += 2) {
  const [a, b] = [nodes[raw.edges[i]], nodes[raw.edges[i + 1]]];
  a.to.push(b);
  b.from.push(a);
}

function commonModule(paths) {
  if (!paths.length) return "";
  let parts = paths[0].split(".");
  for (const path of paths) {
    const other = path.split(".");
    let i = 0;
    while (i < parts.length && parts[i] === other[i]) i++;
    parts = parts.slice(0, i);
  }
  return parts.join(".") || paths[0].split(".")[0];
}
