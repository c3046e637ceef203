// Small multiples: the times and the failures for each value of each tunable.
const MOST_EFFECTS = 12;
let allEffects = false;

function drawEffects() {
  const p = problem, order = ranked(p), host = clear($("effects-charts"));
  $("effects").hidden = !order.length || p.timed.length < 2;
  if ($("effects").hidden) return;
  const named = order.slice(0, 3).filter((at) => p.effects.get(at) >= 1.05).map((at, i) => `${i ? "" : "The wrong "}${p.tunables[at].name} costs up to ${times(p.effects.get(at))}`);
  $("effects-finding").textContent = (named.length ? `${named.join(", ")}, even with the best of all else. ` : "No single tunable matters: each of its values can be as fast as the best. ")
    + "Dots are configs, and the line joins the best of each value.";
  const shown = allEffects ? order : order.slice(0, MOST_EFFECTS);
  const width = tileWidth(host, shown.length);
  for (const at of shown) host.append(effectTile(p, at, width));
  if (order.length > shown.length) host.append(el("button", { type: "button", class: "plain", text: `Show all ${order.length} tunables`, onclick: () => { allEffects = true; drawEffects(); } }));
}

function tileWidth(host, count) {
  const room = host.clientWidth, gap = 16, columns = Math.max(1, Math.min(count, 3, Math.floor((room + gap) / (270 + gap))));
  host.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
  return Math.max(220, (room - gap * (columns - 1)) / columns - 34);
}

function effectTile(p, at, width) {
  const tunable = p.tunables[at], n = tunable.values.length, left = 46, right = width - 6, top = 12, bottom = 150;
  const by = range(n).map(() => ({ timed: [], failed: 0, tried: 0 }));
  for (const trial of p.trials) {
    const group = by[trial.values[at]];
    if (trial.timed) group.timed.push(trial);
    if (trial.outcome.failed) group.failed += 1;
    if (trial.timed || trial.outcome.failed) group.tried += 1;
  }
  const failures = by.some((group) => group.failed), height = bottom + (failures ? 62 : 38);
  const y = scale(p.low * 0.94, p.high * 1.06, bottom, top, { log: true, count: 4 });
  const band = (right - left) / n, x = (v) => left + (v + 0.5) * band;
  const best = by.map((group) => group.timed.reduce((least, trial) => (faster(trial, least) ? trial : least), null));
  const bests = range(n).filter((v) => best[v]);
  const svg = chart(width, height, `${tunable.name}: ${bests.map((v) => `${tunable.values[v]} best ${timeText(p, best[v])}`).join(", ")}`);
  timeGrid(svg, p, y, left, right, 6);
  const spread = Math.min(band * 0.32, 14), points = [];
  by.forEach((group, v) => group.timed.forEach((trial, i) => points.push([x(v) + (((i * 0.618) % 1) - 0.5) * 2 * spread, y(trial.ms), trial])));
  svg.append(draw("path", { d: dots(points), class: points.length > 800 ? "dots many" : "dots" }),
    draw("path", { d: bests.map((v, i) => `${i ? "L" : "M"}${x(v).toFixed(1)} ${y(best[v].ms).toFixed(1)}`).join(""), class: "best-line thin" }),
    draw("path", { d: dots(bests.map((v) => [x(v), y(best[v].ms)])), class: "dots best" }));
  const widest = Math.max(...tunable.values.map((text) => textWidth(short(text, 9)))) + 8, every = Math.max(1, Math.ceil(widest / band));
  tunable.values.forEach((text, v) => {
    const won = p.best && p.best.values[at] === v;
    const near = p.best ? Math.abs(v - p.best.values[at]) : Infinity;
    if (won || (v % every === 0 && near >= every)) svg.append(draw("text", { x: x(v), y: bottom + 17, "text-anchor": "middle", class: won ? "strong small" : "tick", text: short(text, 9) }));
    if (by[v].failed) {
      const share = by[v].failed / by[v].tried, tall = Math.max(1.5, share * 16);
      svg.append(draw("rect", { x: x(v) - Math.min(band * 0.35, 12), y: bottom + 44 - tall, width: Math.min(band * 0.7, 24), height: tall, class: "failures", "data-tip": `${tunable.name}=${text}: ${by[v].failed} of ${by[v].tried} failed` }));
      if (band > 34) svg.append(draw("text", { x: x(v), y: bottom + 57, "text-anchor": "middle", class: "tick", text: percent(share) }));
    }
  });
  if (failures) svg.append(draw("text", { x: left - 6, y: bottom + 44, "text-anchor": "end", class: "tick", text: "failed" }));
  nearest(svg, points, p);
  return el("figure", { class: "card tile" },
    el("figcaption", {}, el("h3", { text: tunable.name }), el("span", { class: "muted", text: p.effects.get(at) >= 1.05 ? `up to ${times(p.effects.get(at))} slower` : "hardly matters" })), svg,
    el("p", { class: "axis-note", text: `time of one call (${p.unit[1]})` }),
    asTable([tunable.name, "best", "median", "configs", "failed"], range(n).map((v) => [tunable.values[v], best[v] ? timeText(p, best[v]) : "–", by[v].timed.length ? p.ms(median(by[v].timed.map((t) => t.ms))) : "–", by[v].tried, by[v].failed])));
}
