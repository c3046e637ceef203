// The rules of the function: their conditions, and the regions of their configs over two sizes.
const REGION_CELLS = 48, MOST_REGION_COLOURS = 10;

function drawRules() {
  $("rules").hidden = !data.rules.length;
  clear($("rules-body")).append(...data.rules.flatMap((rule) => [
    el("p", { class: "finding", text: `${rule.lines.at(-1)}.` }),
    el("div", { class: "card rule" }, el("pre", { class: "mono scroll", tabindex: "0", text: rule.lines.slice(0, -1).join("\n") }), regionsOf(rule)),
  ]));
}
const holds = {
  size: (bound, a) => a <= bound, product: (bound, a, b) => a * b <= bound, ratio: (bound, a, b) => a <= bound * b,
  multiple: (divisor, a) => a % divisor === 0, equal: (value, a) => JSON.stringify(value) === JSON.stringify(a),
};
function answerOf(rule, values) {
  let node = rule.nodes[0];
  while (node.ask !== "answer") node = rule.nodes[holds[node.ask](node.value, ...node.of.map((i) => values[i])) ? node.yes : node.no];
  return node.configs[0];
}

// The two sizes that the most questions are about; the others stay at their middle among the fitted calls.
function regionsOf(rule) {
  const sizes = rule.parts.map((part, i) => (part.least ? i : -1)).filter((i) => i >= 0);
  if (sizes.length < 2) return "";
  const asked = (i) => rule.nodes.filter((node) => node.of.includes(i)).length;
  const [x, y] = [...sizes].sort((a, b) => asked(b) - asked(a)).slice(0, 2).sort((a, b) => a - b);
  const middle = rule.parts.map((part, i) => (part.least ? Math.round(median(rule.calls.map((call) => call.sizes[sizes.indexOf(i)]))) : part.known[0]));
  const divisor = Math.max(1, ...rule.nodes.filter((node) => node.ask === "multiple" && (node.of[0] === x || node.of[0] === y)).map((node) => node.value));
  const wide = Math.min(560, Math.max(280, $("rules-body").clientWidth - 48)), high = Math.round(wide * 0.62);
  const left = 62, bottom = high - 44;
  const across = scale(rule.parts[x].least, rule.parts[x].most, left, wide - 12, { log: true }), up = scale(rule.parts[y].least, rule.parts[y].most, bottom, 10, { log: true });
  const svg = chart(wide, high, `The config that the rule answers, by ${rule.names[x]} and ${rule.names[y]}`);
  const edge = (from, to, i) => from + ((to - from) * i) / REGION_CELLS, at = (axis, pixel) => Math.max(1, Math.round(axis.invert(pixel) / divisor) * divisor);
  const seen = new Set(), colour = (config) => `hsl(${Math.round((360 * (config % MOST_REGION_COLOURS)) / Math.min(MOST_REGION_COLOURS, rule.configs.length))} 55% 62%)`;
  const all = range(REGION_CELLS);
  for (const row of all) {
    const top = edge(10, bottom, row), below = edge(10, bottom, row + 1);
    const answers = all.map((column) => {
      const values = [...middle];
      values[x] = at(across, edge(left, wide - 12, column + 0.5));
      values[y] = at(up, (top + below) / 2);
      return answerOf(rule, values);
    });
    for (let from = 0, to = 0; from < REGION_CELLS; from = to) {
      while (to < REGION_CELLS && answers[to] === answers[from]) to += 1;
      seen.add(answers[from]);
      const start = edge(left, wide - 12, from);
      const cell = draw("rect", { x: start, y: top, width: edge(left, wide - 12, to) - start + 0.5, height: below - top + 0.5 });
      cell.style.fill = colour(answers[from]);
      svg.append(cell);
    }
  }
  for (const call of rule.calls) svg.append(draw("circle", { cx: across(call.sizes[sizes.indexOf(x)]), cy: up(call.sizes[sizes.indexOf(y)]), r: 3, class: "fitted" }, draw("title", { text: `${call.call}: ${(100 * call.loss).toFixed(1)} % above its best` })));
  for (const tick of across.ticks) svg.append(draw("text", { x: across(tick), y: bottom + 16, "text-anchor": "middle", class: "tick", text: trimmed(tick) }));
  for (const tick of up.ticks) svg.append(draw("text", { x: left - 6, y: up(tick) + 4, "text-anchor": "end", class: "tick", text: trimmed(tick) }));
  svg.append(draw("text", { x: (left + wide) / 2, y: high - 8, "text-anchor": "middle", class: "tick", text: fitted(rule.names[x], wide - left) }),
    draw("text", { x: 12, y: bottom / 2, "text-anchor": "middle", class: "tick", transform: `rotate(-90 12 ${bottom / 2})`, text: fitted(rule.names[y], bottom) }));
  const others = sizes.filter((i) => i !== x && i !== y).map((i) => `${rule.names[i]} = ${middle[i]}`);
  const where = [...others, divisor > 1 ? `multiples of ${divisor}` : ""].filter(Boolean).join(", ");
  return el("figure", { class: "regions" }, svg, el("figcaption", { class: "legend" },
    [...seen].sort((a, b) => a - b).map((config) => {
      const key = el("span", { class: "key fill", "aria-hidden": "true" });
      key.style.background = colour(config);
      return el("span", { class: "item" }, key, rule.labels[config]);
    }), el("span", { class: "item muted", text: `dots: the fitted calls${where ? `; drawn for ${where}` : ""}` })));
}
