// The data of the page, decoded, and what is selected in it.
const data = JSON.parse($("data").textContent);
const OUTCOMES = data.outcomes.map(([name, failed]) => ({ name, failed, letter: LETTERS[name] || "?", label: name.replace("_", " ") }));

function decode(raw) {
  const columns = raw.trials, trials = [];
  const finals = new Map(raw.finalists.map(([i, , , samples]) => [i, samples]));
  for (let i = 0; i < columns.n; i += 1) {
    const outcome = OUTCOMES[columns.outcome[i]];
    trials.push({
      i, outcome, phase: columns.phase[i], ms: columns.ms[i], compile: columns.compile[i], memory: columns.memory[i],
      deviceMemory: columns.deviceMemory[i], flops: columns.flops[i], moved: columns.moved[i], figures: raw.figures.map(([name]) => columns[name][i]),
      message: data.texts[columns.message[i]], log: data.texts[columns.log[i]], device: data.texts[columns.device[i]],
      clock: columns.clock[i], bits: columns.bits[i], batch: columns.batch[i], samples: finals.get(i) || columns.samples[i], final: finals.has(i), ended: columns.ended[i],
      values: columns.config.map((column) => column[i]),
      timed: columns.ms[i] !== null && (outcome.name === "ok" || outcome.name === "slow"),
    });
  }
  const problem = { ...raw, trials, finals: [] };
  problem.timed = trials.filter((trial) => trial.timed);
  problem.best = raw.best === null ? null : trials[raw.best];
  problem.default = raw.default === null ? null : trials[raw.default];
  problem.tie = raw.tie.map((i) => trials[i]);
  // The function's own defaults are a finalist without a trial where they are none of the configs.
  problem.finals = raw.finalists.map(([i, text, isDefault, samples]) => ({
    name: (text || "the function's own values") + (isDefault ? " (the defaults)" : ""), samples,
    won: i === null ? isDefault && raw.defaultsWin : i === raw.best, tied: i !== null && raw.tie.includes(i), trial: i === null ? null : trials[i] }));
  const typical = raw.bestMs ?? (problem.timed.length ? Math.min(...problem.timed.map((t) => t.ms)) : 1);
  problem.unit = typical < 0.001 ? [1e6, "ns"] : typical < 0.1 ? [1e3, "µs"] : typical >= 1000 ? [1e-3, "s"] : [1, "ms"];
  problem.ms = (ms) => `${digits(ms * problem.unit[0])} ${problem.unit[1]}`;
  problem.tick = (ms) => trimmed(ms * problem.unit[0]);
  problem.varied = raw.tunables.map((_, at) => at).filter((at) => raw.tunables[at].values.length > 1);
  let low = Infinity, high = 0;
  for (const trial of problem.timed) { low = Math.min(low, trial.ms); high = Math.max(high, trial.ms); }
  if (!problem.timed.length) low = high = problem.bestMs ?? 1;
  problem.low = low; problem.high = high;
  const finished = problem.timed.filter((trial) => trial.outcome.name === "ok");
  problem.least = finished.reduce((least, trial) => Math.min(least, trial.ms), finished.length ? Infinity : low);
  // Slow configs are common and far: the colours end where nine of ten configs are.
  const sorted = problem.timed.map((t) => t.ms).sort((a, b) => a - b);
  const end = Math.max(sorted[Math.floor(0.9 * (sorted.length - 1))] ?? 0, problem.least * 1.001);
  problem.share = (ms) => Math.log(ms / problem.least) / Math.log(end / problem.least);
  problem.rampEnd = end;
  problem.effects = new Map(problem.varied.map((at) => [at, effectOf(problem, at)]));
  return problem;
}

// How many times slower the best config is with the worst value of a tunable than with its best one. Values with which
// nothing works do not count.
function effectOf(problem, at) {
  const best = new Map();
  for (const trial of problem.timed) if (faster(trial, best.get(trial.values[at]))) best.set(trial.values[at], trial);
  return best.size ? Math.max(...[...best.values()].map((trial) => trial.ms)) / problem.least : 1;
}

// Whether a config is better than another. Configs that were stopped early have shown only that they are not the best.
function faster(trial, other) {
  if (!other) return true;
  if (trial.outcome !== other.outcome) return trial.outcome.name === "ok";
  return trial.ms < other.ms;
}
// How many trials ended in each way that occurred.
const endsOf = (trials) => OUTCOMES.map((outcome) => [outcome, trials.filter((trial) => trial.outcome === outcome).length]).filter(([, n]) => n);
const value = (problem, trial, at) => problem.tunables[at].values[trial.values[at]];
const configText = (problem, trial) => problem.tunables.map((tunable, at) => `${tunable.name}=${value(problem, trial, at)}`).join(" ")
  || "the only config";
const timeText = (problem, trial) => (trial.ms === null ? "" : trial.outcome.name === "slow" ? `> ${problem.ms(trial.ms)}` : problem.ms(trial.ms));
const endText = (problem, trial) => (trial.timed ? timeText(problem, trial) : trial.outcome.label)
  + (trial.outcome.failed && trial.phase ? ` in ${trial.phase}` : "");
// The shares of the device's peaks that a config reaches, where both the peaks and its program's costs are known.
function sharesOf(problem, trial) {
  const { peaks } = problem, shares = [];
  if (!peaks || !trial || trial.outcome.name !== "ok" || !trial.ms) return shares;
  if (peaks.tflops && trial.flops) shares.push({ name: "Operations", share: trial.flops / trial.ms / peaks.tflops / 1e9, peak: `${digits(peaks.tflops)} TFLOP/s in ${peaks.dtype}` });
  if (trial.moved) shares.push({ name: "Bandwidth", share: trial.moved / trial.ms / peaks.gbps / 1e6, peak: `${digits(peaks.gbps)} GB/s` });
  return shares;
}
const figuresText = (problem, trial) => [
  trial.deviceMemory === null ? "" : `device memory ${bytes(trial.deviceMemory)}`,
  ...sharesOf(problem, trial).map(({ name, share, peak }) => `${name.toLowerCase()}: ${percent(share)} of the peak of ${peak}`),
].filter(Boolean).map((line) => `\n${line}`).join("");
function ranked(problem) {
  return [...problem.varied].sort((a, b) => problem.effects.get(b) - problem.effects.get(a) || a - b);
}

// The selection: values chosen on axes, a span of times, outcomes left out, and the words of the filter.
const selection = { values: new Map(), time: null, hidden: new Set(), words: "" };
const listeners = [];
let problem = null;
function changed() { for (const listen of listeners) listen(); }
function brushed(trial) {
  for (const [at, chosen] of selection.values) if (!chosen.has(trial.values[at])) return false;
  return !selection.time || (trial.timed && trial.ms >= selection.time[0] && trial.ms <= selection.time[1]);
}
function clearBrushes() {
  selection.values.clear();
  selection.time = null;
}
function choose(at, chosen) {
  if (!chosen.size || chosen.size === problem.tunables[at].values.length) selection.values.delete(at);
  else selection.values.set(at, chosen);
  changed();
}
