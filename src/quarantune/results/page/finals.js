// The finalists' samples, their medians and the band of ties. Labels say in what a config differs from the winner.
const LONG_LABEL = 40;
function drawFinals() {
  const p = problem, host = clear($("finals-chart"));
  let rows = p.finals;
  if (!rows.length && !p.state && p.best && p.best.samples.length) rows = [{ name: shortText(p, p.best), samples: p.best.samples, won: true, trial: p.best }];
  $("finals").hidden = !rows.length;
  if (!rows.length) return;
  // One time per config: the page has that of a finalist as its trial's.
  const mid = new Map(rows.map((row) => [row, row.trial?.ms ?? median(row.samples)]));
  rows = [...rows].sort((a, b) => Boolean(b.won) - Boolean(a.won) || mid.get(a) - mid.get(b));
  const tied = rows.filter((row) => row.won || row.tied);
  const rest = p.tie.length, unseen = p.tie.filter((trial) => !rows.some((row) => row.trial === trial));
  $("finals-finding").textContent = rows.length === 1
    ? (p.timed.length > 1 ? "Nothing was timed in turn with the winner, or no record of that was kept." : "The samples of the only config that was measured.")
    : `These ${rows.length} were timed in turn, so that drift of the machine meets all alike. `
      + (rest ? `${plural(rest, "config")} ${rest === 1 ? "is" : "are"} as fast as the winner within the noise.` : "The winner stands clear of the noise.");
  const width = Math.max(280, roomIn(host)), narrow = width < 620;
  for (const row of rows) if (row.won && rows.length > 1 && row.name.length > LONG_LABEL) row.name = "the winner";
  const longest = Math.max(...rows.map((trial) => textWidth(trial.name, MONO)));
  const left = narrow ? 8 : Math.min(longest + 34, width * 0.42), right = width - 84;
  const step = narrow ? 56 : 40, top = 26, height = top + rows.length * step + 44;
  const all = rows.flatMap((trial) => trial.samples), tops = Math.max(...mid.values()),
    low = Math.min(...all),
high = Math.max(tops, ...rows.map((trial) => Math.min(Math.max(...trial.samples), usual(trial.samples))));
  const pad = (high - low) * 0.03 || low * 0.02, log = high > 8 * low;  // the defaults may be far behind
  const x = scale(log ? low * 0.95 : low - pad, log ? high * 1.05 : high + pad, left, right, { log, count: narrow ? 3 : 6 });
  const svg = chart(width, height, rows.map((trial) => `${trial.name}: median ${p.ms(mid.get(trial))} of ${trial.samples.length} samples${tied.includes(trial) ? ", tied or winner" : ""}`).join("; "));
  for (const tick of x.ticks) svg.append(
    draw("line", { x1: x(tick), x2: x(tick), y1: top, y2: height - 40, class: "grid" }),
    draw("text", { x: x(tick), y: height - 24, "text-anchor": "middle", class: "tick", text: p.tick(tick) }));
  svg.append(draw("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle", class: "axis", text: `time of one call (${p.unit[1]}${log ? ", logarithmic" : ""})` }));
  if (tied.length > 1) {
    const ends = tied.map((trial) => x(mid.get(trial)));
    const from = Math.min(...ends) - 3, to = Math.max(...ends) + 3;
    svg.append(draw("rect", { x: from, y: top - 4, width: to - from, height: rows.length * step + 8, class: "band" }),
      draw("text", { x: Math.min(Math.max(from, left), right - 60), y: top - 10, class: "band-label", text: "tie band" }));
  }
  rows.forEach((trial, row) => {
    const y = top + row * step + (narrow ? 38 : 20), centre = mid.get(trial), won = trial.won;
    const seen = trial.samples.filter((ms) => ms <= x.high), above = trial.samples.length - seen.length;
    const name = `${won ? "★ " : tied.includes(trial) ? "= " : ""}${trial.name}`;
    const room = narrow ? width - 16 : left - 18;
    svg.append(
      draw("g", { "data-tip": `${trial.name}\nmedian ${p.ms(centre)} of ${plural(trial.samples.length, "sample")}${won ? "\nthe winner" : tied.includes(trial) ? "\ntied with the winner" : ""}${trial.trial ? figuresText(p, trial.trial) : ""}` },
        draw("text", { x: narrow ? 8 : left - 14, y: narrow ? y - 20 : y + 4, "text-anchor": narrow ? "start" : "end", class: won ? "mono strong" : "mono", text: fitted(name, room, MONO) }),
        draw("path", { d: dots(seen.map((ms, i) => [x(ms), y + ((i * 7) % 5 - 2) * 2.2])), class: won ? "dots best" : "dots" }),
        draw("line", { x1: x(centre), x2: x(centre), y1: y - 11, y2: y + 11, class: won ? "median best" : "median" })),
      draw("text", { x: right + 8, y: y + 4, class: won ? "strong" : "label", text: p.ms(centre) }));
    if (above) svg.append(draw("text", { x: right - 2, y: y - 10, "text-anchor": "end", class: "tick", text: `${above} above →` }));
  });
  host.append(svg, el("figcaption", { class: "muted", text: `Each dot is a sample, each bar a median.${rows.length > 1 && p.varied.length > 1 ? " A label has the tunables that differ from the winner's." : ""}${unseen.length ? ` Also tied, often because they are the same program: ${unseen.slice(0, 4).map((trial) => shortText(p, trial)).join("; ")}${unseen.length > 4 ? ` and ${unseen.length - 4} more` : ""}.` : ""}` }),
    asTable(["config", "median", "samples", "least", "most", ""], rows.map((trial) => [trial.name, p.ms(mid.get(trial)), trial.samples.length, p.ms(Math.min(...trial.samples)), p.ms(Math.max(...trial.samples)), trial.won ? "winner" : tied.includes(trial) ? "tied" : ""])));
}

// The end of the usual samples: later ones come from interruptions, and are counted at the edge instead of drawn.
function usual(samples) {
  const sorted = [...samples].sort((a, b) => a - b), at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return at(0.75) + 3 * (at(0.75) - at(0.25)) + 0.03 * at(0.5);
}
