// The data of the page, decoded, and what is selected in it.
const data = JSON.parse($("data").textContent);
const OUTCOMES = data.outcomes.map(([name, failed]) => ({ name, failed, letter: LETTERS[name] || "?", label: name.replace("_", " ") }));

function decode(raw) {
  const columns = raw.trials, trials = [];
  const finals = new Map(raw.finalists.map(([i, , , samples]) => [i, samples]));
  for (let i = 0; i < columns.n; i += 1) {
    const outcome = OUTCOMES[columns.outcome[i]];
    trials.push({
      i, outcome, phase: columns.phase[i], ms: columns.ms[i], kind: columns.kind[i], compile: columns.compile[i], memory: columns.memory[i],
      deviceMemory: columns.deviceMemory[i], flops: columns.flops[i], moved: columns.moved[i], figures: raw.figures.map(([name]) => columns[name][i]),
      message: data.texts[columns.message[i]], log: data.texts[columns.log[i]], device: data.texts[columns.device[i]],
      clock: columns.clock[i], bits: columns.bits[i], batch: columns.batch[i], samples: finals.get(i) || columns.samples[i], final: finals.has(i), ended: columns.ended[i],
      values: columns.config.map((column) => column[i]),
      timed: columns.ms[i] !== null,
    });
  }
  const problem = { ...raw, trials, finals: [] };
  problem.timed = trials.filter((trial) => trial.timed);
  problem.best = raw.best === null ? null : trials[raw.best];
  problem.default = raw.default === null ? null : trials[raw.default];
  problem.tie = raw.tie.map((i) => trials[i]);
  // The function's own defaults are a finalist without a trial where they are none of the configs.
  problem.finals = raw.finalists.map(([i, text, isDefault, samples]) => ({
    name: isDefault ? `defaults${text ? `: ${text}` : ""}` : text, samples,
    won: i === null ? isDefault && raw.defaultsWin : i === raw.best, tied: i !== null && raw.tie.includes(i), trial: i === null ? null : trials[i] }));
  problem.unit = data.unit;
  problem.ms = (ms) => `${digits(ms * problem.unit[0])} ${problem.unit[1]}`;
  problem.tick = (ms) => trimmed(ms * problem.unit[0]);
  problem.varied = raw.tunables.map((_, at) => at).filter((at) => raw.tunables[at].values.length > 1);
  let low = Infinity, high = 0;
  for (const trial of problem.timed) { low = Math.min(low, trial.ms); high = Math.max(high, trial.ms); }
  if (!problem.timed.length) low = high = problem.bestMs ?? 1;
  problem.low = low; problem.high = high;
  const finished = problem.timed.filter((trial) => trial.kind !== "at least");
  problem.least = finished.reduce((least, trial) => Math.min(least, trial.ms), finished.length ? Infinity : low);
  // Slow configs are common and far: the colours end where nine of ten configs are.
  const sorted = problem.timed.map((t) => t.ms).sort((a, b) => a - b);
  const end = Math.max(sorted[Math.floor(0.9 * (sorted.length - 1))] ?? 0, problem.least * 1.001);
  problem.share = (ms) => Math.log(ms / problem.least) / Math.log(end / problem.least);
  problem.rampEnd = end;
  problem.isFew = trials.length < 4;
  return problem;
}

// Whether a config is better than another. Configs that were stopped early have shown only that they are not the best.
function faster(trial, other) {
  if (!other) return true;
  if ((trial.kind === "at least") !== (other.kind === "at least")) return trial.kind !== "at least";
  return trial.ms < other.ms;
}
// How many trials ended in each way that occurred.
const endsOf = (trials) => OUTCOMES.map((outcome) => [outcome, trials.filter((trial) => trial.outcome === outcome).length]).filter(([, n]) => n);
const value = (problem, trial, at) => problem.tunables[at].values[trial.values[at]];
const configText = (problem, trial) => problem.tunables.map((tunable, at) => `${tunable.name}=${value(problem, trial, at)}`).join(" ")
  || "the only config";
// A config by the tunables in which the configs of the sweep differ.
const shortText = (problem, trial) => problem.varied.map((at) => `${problem.tunables[at].name}=${value(problem, trial, at)}`).join(" ") || configText(problem, trial);
const atLeast = (problem, ms) => `> ${digits(bound(ms * problem.unit[0], 3))}`;
const timeText = (problem, trial) => (trial.ms === null ? "" : trial.kind === "at least" ? `${atLeast(problem, trial.ms)} ${problem.unit[1]}` : problem.ms(trial.ms));
// The best time of several configs: a time, a bound, or the two times between which it lies.
function rangeText(problem, { low, high }, most = 3) {
  const [from, to] = [low, high].map((ms) => ms * problem.unit[0]);
  if (low === high) return digits(from, most);
  if (high === Infinity) return `> ${digits(bound(from, most), most)}`;
  return `${digits(bound(from, most), most)} … ${digits(bound(to, most, Math.ceil), most)}`;
}
const endText = (problem, trial) => (trial.timed ? timeText(problem, trial) : trial.outcome.label)
  + (trial.outcome.failed && trial.phase ? ` in ${trial.phase}` : "");
// The shares of the device's peaks that a config reaches, where both the peaks and its program's costs are known.
function sharesOf(problem, trial) {
  const { peaks } = problem, shares = [];
  if (!peaks || !trial || trial.kind === "at least" || !trial.ms) return shares;
  if (peaks.tflops && trial.flops) shares.push({ name: "Operations", share: trial.flops / trial.ms / peaks.tflops / 1e9, peak: `${digits(peaks.tflops)} TFLOP/s in ${peaks.dtype}` });
  if (trial.moved) shares.push({ name: "Bandwidth", share: trial.moved / trial.ms / peaks.gbps / 1e6, peak: `${digits(peaks.gbps)} GB/s` });
  return shares;
}
const figuresText = (problem, trial) => [
  trial.deviceMemory === null ? "" : `device memory ${bytes(trial.deviceMemory)}`,
  ...sharesOf(problem, trial).map(({ name, share, peak }) => `${name.toLowerCase()}: ${percent(share)} of the peak of ${peak}`),
].filter(Boolean).map((line) => `\n${line}`).join("");
function ranked(problem) {
  const [of, most] = [(at) => problem.effects[at].factor, (at) => problem.effects[at].factor[1] ?? Infinity];
  return [...problem.varied].sort((a, b) => of(b)[0] - of(a)[0] || (most(a) === most(b) ? 0 : most(b) - most(a)) || a - b);
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
