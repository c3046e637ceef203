// Best so far over time, with every trial as a dot and failures below.
function drawProgress() {
  const p = problem, host = clear($("progress-chart"));
  const byTime = p.trials.length > 0 && p.trials.filter((trial) => trial.outcome.name !== "pruned").every((trial) => trial.ended !== null);
  const order = p.trials.filter((trial) => trial.outcome.name !== "pruned" && trial.outcome.name !== "not_run");
  if (byTime) order.sort((a, b) => a.ended - b.ended);
  const at = (trial, rank) => (byTime ? trial.ended : rank + 1);
  const steps = p.bestSoFar.map((i) => p.trials[i]).map((trial) => [at(trial, order.indexOf(trial)), trial, order.indexOf(trial)]);
  $("progress").hidden = order.length < 2 || !steps.length || p.isFew;
  if ($("progress").hidden) return;
  const last = at(order[order.length - 1], order.length - 1), end = steps[steps.length - 1];
  const when = byTime ? `after ${seconds(end[0])} of ${seconds(last)}` : `as trial ${end[2] + 1} of ${order.length}`;
  $("progress-finding").textContent = `The fastest config came ${when}, ${steps.length > 1 ? `after ${plural(steps.length - 1, "improvement")} on the first that worked` : "the first that worked"}.`
    + (!p.state && p.best && end[1] !== p.best && p.best.ms !== null ? ` The lowest time is ${p.ms(end[1].ms)}, of ${shortText(p, end[1])}; the winner, at ${p.ms(p.best.ms)}, was chosen by comparing the fastest more carefully.` : "")
    + (p.trials.length && p.trialsPaused ? ` Pauses of ${seconds(p.trialsPaused)} between interrupted sweeps are left out.` : "");
  const width = Math.max(280, roomIn(host)), narrow = width < 560, left = 56, aside = `defaults ${p.defaultMs === null ? "" : p.ms(p.defaultMs)}`,
    right = width - (narrow ? 16 : 18 + textWidth(aside, "13px system-ui, sans-serif"));
  const failed = order.map((trial, rank) => [trial, rank]).filter(([trial]) => trial.outcome.failed);
  const strip = failed.length ? 26 : 0, top = 30, bottom = 270, height = bottom + strip + 46;
  const shown = p.defaultMs === null ? [p.low, p.high] : [Math.min(p.low, p.defaultMs), Math.max(p.high, p.defaultMs)];
  // In a narrow chart the lines are named within it, the best one below its line.
  const y = scale(shown[0] * 0.93, shown[1] * 1.07, narrow ? bottom - 18 : bottom, top, { log: true });
  const [per, unit] = !byTime ? [1, ""] : last > 7200 ? [3600, "hours"] : last > 300 ? [60, "minutes"] : [1, "seconds"];
  const inUnits = scale(0, Math.max(last, 1e-9) / per, left, right, { log: false, count: narrow ? 4 : 8 });
  const x = (t) => inUnits(t / per);
  const svg = chart(width, height, steps.map(([t, trial]) => `${byTime ? seconds(t) : `trial ${t}`}: ${p.ms(trial.ms)}`).join(", "));
  timeAxes(svg, p, inUnits, y, { left, right, height, name: byTime ? `${unit} since the sweep began` : "number of the trial" });
  const points = [];
  order.forEach((trial, rank) => { if (trial.timed) points.push([x(at(trial, rank)), y(trial.ms), trial]); });
  timedDots(svg, points, order.length);
  for (const outcome of OUTCOMES) {
    const some = failed.filter(([trial]) => trial.outcome === outcome);
    if (some.length) svg.append(draw("path", { d: some.map(([trial, rank]) => `M${x(at(trial, rank)).toFixed(1)} ${bottom + 12}v14`).join(""), class: `rug ${outcome.name}` }));
  }
  if (failed.length) svg.append(draw("text", { x: left - 8, y: bottom + 23, "text-anchor": "end", class: "tick", text: "failed" }));
  const bestY = y(end[1].ms), named = { x: narrow ? right : right + 8, "text-anchor": narrow ? "end" : "start" };
  if (p.defaultMs !== null) {
    const defaultY = y(p.defaultMs), besideY = Math.abs(defaultY - bestY) < 15 ? bestY - 11 : defaultY + 4;
    svg.append(draw("line", { x1: left, x2: right, y1: defaultY, y2: defaultY, class: "was" }),
      draw("text", { ...named, y: narrow ? defaultY - 6 : besideY, class: "label", text: `defaults ${p.ms(p.defaultMs)}` }));
  }
  let path = "";
  steps.forEach(([t, trial], i) => { path += i ? `H${x(t).toFixed(1)}V${y(trial.ms).toFixed(1)}` : `M${x(t).toFixed(1)} ${y(trial.ms).toFixed(1)}`; });
  svg.append(draw("path", { d: `${path}H${right}`, class: "best-line" }),
    draw("path", { d: dots(steps.map(([t, trial]) => [x(t), y(trial.ms)])), class: "dots best" }),
    draw("text", { ...named, y: bestY + (narrow ? 18 : 4), class: "strong", text: `${end[1] === p.best ? "best" : "lowest"} ${p.ms(end[1].ms)}` }));
  failed.forEach(([trial, rank]) => points.push([x(at(trial, rank)), bottom + 19, trial]));
  nearest(svg, points, p);
  host.append(svg, asTable([byTime ? "after" : "trial", "config", "time"], steps.map(([t, trial]) => [byTime ? seconds(t) : t, shortText(p, trial), p.ms(trial.ms)])));
}

// Shows the tooltip of the point nearest to the pointer.
function nearest(svg, points, p) {
  svg.setAttribute("data-near", "");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    let found = null, least = 400;
    for (const [x, y, trial] of points) {
      const far = (x - px) ** 2 + (y - py) ** 2;
      if (far < least) { least = far; found = trial; }
    }
    if (found) showTip(`${shortText(p, found)}\n${endText(p, found)}${figuresText(p, found)}`, event.clientX, event.clientY);
    else hideTip();
  });
  svg.addEventListener("pointerleave", hideTip);
}
