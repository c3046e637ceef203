// Time against device memory: every timed config as a dot, and the line of those that no other beats in both.
function drawPareto() {
  const p = problem, host = clear($("pareto-chart"));
  // One that was stopped early has the median of the samples that it had, as elsewhere only its fastest run is told.
  const ms = (trial) => (trial.outcome.name === "slow" && trial.samples.length ? median(trial.samples) : trial.ms);
  const known = p.timed.filter((trial) => trial.deviceMemory !== null), sizes = known.map((trial) => trial.deviceMemory);
  $("pareto").hidden = new Set(sizes).size < 2 || !p.pareto.length;
  if ($("pareto").hidden) return;
  const front = p.pareto.map((i) => p.trials[i]), [fast] = front, small = front[front.length - 1];
  $("pareto-finding").textContent = front.length === 1
    ? `${configText(p, fast)} takes the least time and the least device memory: ${p.ms(ms(fast))} and ${bytes(fast.deviceMemory)}.`
    : `${front.length} of ${plural(known.length, "timed config")} are worth a choice: no other beats them in both. From ${bytes(fast.deviceMemory)} and ${p.ms(ms(fast))}, memory falls to ${bytes(small.deviceMemory)}, for ${times(ms(small) / ms(fast))} the time.`;
  const width = Math.max(280, roomIn(host)), left = 56, right = width - 24, top = 30, bottom = 270, height = bottom + 46;
  const low = Math.min(...known.map((trial) => ms(trial))), high = Math.max(...known.map((trial) => ms(trial)));
  const y = scale(low * 0.93, high * 1.07, bottom, top, { log: true });
  const unit = 1024 ** Math.min(4, Math.floor(Math.log2(Math.max(...sizes)) / 10)), name = ["B", "KiB", "MiB", "GiB", "TiB"][Math.round(Math.log2(unit) / 10)];
  const inUnits = scale((Math.min(...sizes) * 0.97) / unit, (Math.max(...sizes) * 1.03) / unit, left, right, { count: width < 560 ? 3 : 8 });
  const x = (trial) => inUnits(trial.deviceMemory / unit);
  const svg = chart(width, height, front.map((trial) => `${bytes(trial.deviceMemory)}: ${p.ms(ms(trial))}`).join(", "));
  timeAxes(svg, p, inUnits, y, { left, right, height, name: `device memory (${name})${inUnits.log ? ", logarithmic" : ""}` });
  const points = known.map((trial) => [x(trial), y(ms(trial)), trial]);
  let path = `M${right} ${y(ms(fast)).toFixed(1)}`;
  for (const trial of front) path += `V${y(ms(trial)).toFixed(1)}H${x(trial).toFixed(1)}`;
  timedDots(svg, points, known.length);
  svg.append(draw("path", { d: `${path}V${top}`, class: "best-line" }),
    draw("path", { d: dots(front.map((trial) => [x(trial), y(ms(trial))])), class: "dots best" }));
  nearest(svg, points, p);
  host.append(svg, asTable(["config", "time", "device memory"], front.map((trial) => [configText(p, trial), p.ms(ms(trial)), bytes(trial.deviceMemory)])));
}
