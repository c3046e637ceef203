// Small multiples: the times and the failures for each value of each tunable.
const MOST_EFFECTS = 12;
let allEffects = false;

function drawEffects() {
  const p = problem, order = ranked(p), host = clear($("effects-charts"));
  $("effects").hidden = !order.length || p.timed.length < 2 || p.isFew;
  if ($("effects").hidden) return;
  const named = order.filter((at) => p.effects[at].notable).slice(0, 3).map((at, i) => `${i ? "with" : "With"} the worst ${p.tunables[at].name} ${i ? "" : "a call takes "}${p.effects[at].text}`);
  $("effects-finding").textContent = (named.length ? `${named.join(", ")}; all else is at its best. ` : "No single tunable surely matters: each of its values may be as fast as the best. ")
    + `Dots are configs, and the line joins the best of each value${p.timed.some((trial) => trial.kind === "at least") ? "; a pale bar begins at a bound" : ""}.`;
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
  const best = p.effects[at].best.map((ends) => ends && { low: ends[0], high: ends[1] ?? Infinity });
  const bests = range(n).filter((v) => best[v]);
  const svg = chart(width, height, `${tunable.name}: ${bests.map((v) => `${tunable.values[v]} best ${rangeText(p, best[v])} ${p.unit[1]}`).join(", ")}`);
  timeGrid(svg, p, y, left, right, 6);
  const spread = Math.min(band * 0.32, 14), points = [];
  by.forEach((group, v) => group.timed.forEach((trial, i) => points.push([x(v) + (((i * 0.618) % 1) - 0.5) * 2 * spread, y(trial.ms), trial])));
  timedDots(svg, points, points.length);
  // A best time that is not known is a bar from its bound upwards, to the least time that is known.
  svg.append(draw("path", { d: bests.map((v, i) => `${i ? "L" : "M"}${x(v).toFixed(1)} ${y(best[v].low).toFixed(1)}`).join(""), class: "best-line thin" }),
    draw("path", { d: bests.filter((v) => best[v].low !== best[v].high).map((v) => `M${x(v).toFixed(1)} ${y(best[v].low).toFixed(1)}V${(best[v].high === Infinity ? top : y(best[v].high)).toFixed(1)}`).join(""), class: "open-end" }),
    draw("path", { d: dots(bests.filter((v) => best[v].low === best[v].high).map((v) => [x(v), y(best[v].low)])), class: "dots best" }));
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
    el("figcaption", {}, el("h3", { text: tunable.name }), el("span", { class: "muted", text: p.effects[at].text })), svg,
    el("p", { class: "axis-note", text: `time of one call (${p.unit[1]})` }),
    asTable([tunable.name, "best", "configs", "failed"], range(n).map((v) => [tunable.values[v], best[v] ? `${rangeText(p, best[v])} ${p.unit[1]}` : "–", by[v].tried, by[v].failed])));
}
