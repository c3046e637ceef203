// The winner against the defaults, and how the configs ended.
function drawWinner() {
  const p = problem, best = p.bestMs;
  $("winner-title").textContent = p.state ? (p.best ? "The best config so far" : !p.trials.length ? "No config has ended" : "No config has worked") + (several ? ` for ${p.label}` : "")
    : several ? `Winner for ${p.label}` : "Winner against the defaults";
  const wins = p.defaultsWin;
  const searched = p.space === null ? "" : p.seen === p.space ? ` among all ${plural(p.space, "config")}` : ` among ${p.seen?.toLocaleString("en")} configs tried of ${p.space.toLocaleString("en")}`;
  if (p.state && !p.best) {
    $("winner-finding").textContent = `The sweep ${p.state === "running" ? "runs" : p.state === "failed" ? "failed" : "was interrupted"}: ${p.progress}.`;
    $("winner-why").textContent = "";
    clear($("winner-body")).append(outcomeStrip(p));
    $("winner-note").textContent = p.note;
    $("winner-copy").replaceChildren();
    return;
  }
  let text = !p.choice.length ? "The only config" : p.state ? `${p.bestText} is the best of ${p.progress} so far` : `${p.bestText} is the choice${searched}`;
  if (best !== null) text += p.choice.length ? `: ${p.ms(best)}` : ` takes ${p.ms(best)}`;
  if (wins) text += p.choice.length ? ". The defaults are the best choice." : ".";
  else if (p.compared) text += `, ${p.compared}${p.interval ? ` (the noise allows ${p.interval})` : ""}.`;
  else text += p.default && p.default.outcome.failed ? `. The defaults ended as ${p.default.outcome.label}.` : ".";
  $("winner-finding").textContent = text;
  $("winner-why").textContent = p.why && p.choice.length && !p.state ? `It ${p.why}.` : "";
  const body = clear($("winner-body"));
  body.append(el("div", { class: "choice" },
    el("p", { class: "big" }, best === null ? "–" : p.ms(best), p.compared && !wins ? el("span", { class: "gain", text: p.compared }) : null),
    el("dl", { class: "config" }, p.choice.map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text }))))));
  const bars = el("figure", { class: "bars" });
  body.append(bars);
  drawBars(bars, p, wins);
  drawShares(bars, p);
  body.append(outcomeStrip(p));
  const searchEnd = { exhausted: "every config tried", max_trials: "ended by max_trials", time_budget: "ended by its time budget", patience: "ended by patience", no_gain: "ended as no gain was expected" }[p.stopped];
  $("winner-note").textContent = [searchEnd, p.note].filter(Boolean).join(" · ");
  $("winner-copy").replaceChildren(...(p.best ? [copyButton("Copy config as Python", () => asPython(p, p.best))] : []));
}

function drawBars(host, p, wins) {
  const rows = [];
  if (p.bestMs !== null) rows.push([p.state ? "Best so far" : "Winner", p.bestMs, "best", p.bestText]);
  if (p.defaultMs !== null && !wins) rows.push(["Defaults", p.defaultMs, "was", p.default ? shortText(p, p.default) : "the function's own values"]);
  // A config that was stopped early may take any longer time.
  const most = (t) => (t.kind === "at least" ? Infinity : t.ms), text = (low, high) => `${rangeText(p, { low, high })} ${p.unit[1]}`;
  const mids = [median(p.timed.map((t) => t.ms)), median(p.timed.map(most))];
  if (p.timed.length > 3) rows.push(["Median config", mids[0], "other", `of ${plural(p.timed.length, "timed config")}`, text(...mids)]);
  if (p.timed.length > 2) rows.push(["Slowest", p.high, "other", "of the timed configs", text(p.high, Math.max(...p.timed.map(most)))]);
  clear(host);
  if (rows.length) host.append(barChart(host, rows, Math.max(...rows.map((row) => row[1])), p.ms));
}

// The shares of the device's peaks that the winner reaches: a bar in a frame that stands for the peak.
function drawShares(host, p) {
  const rows = sharesOf(p, p.best && { ...p.best, ms: p.bestMs }).map(({ name, share, peak }) => [name, share, "best", `of the device's peak of ${peak}, by the compiler's count`]);
  if (!rows.length) return;
  host.append(el("p", { class: "muted shares", text: `The ${p.state ? "best config" : "winner"}'s share of the device's peak${rows.some(([, share]) => share > 1) ? "; beyond it, caches serve a part" : ""}` }),
    barChart(host, rows, 1, percent, true));
}

function barChart(host, rows, most, show, framed = false) {
  const width = Math.max(240, roomIn(host)), label = 112, room = width - label - 96;
  const svg = chart(width, rows.length * 34 + 2, rows.map(([name, amount, , , text]) => `${name} ${text ?? show(amount)}`).join(", "));
  rows.forEach(([name, amount, kind, what, text = show(amount)], row) => {
    const y = row * 34 + 3, long = Math.max(2, Math.min(1, amount / most) * room);
    svg.append(draw("g", { "data-tip": `${name}: ${text}\n${what}` },
      draw("text", { x: label - 10, y: y + 18, "text-anchor": "end", class: kind === "best" ? "strong" : "label", text: name }),
      framed ? draw("rect", { x: label, y, width: room, height: 26, rx: 3, class: "bar peak" }) : null,
      draw("rect", { x: label, y, width: long, height: 26, rx: 3, class: `bar ${kind}` }),
      draw("text", { x: label + (framed ? room : long) + 8, y: y + 18, class: kind === "best" ? "strong" : "label", text })));
  });
  return svg;
}

function outcomeStrip(p) {
  const counts = endsOf(p.trials);
  if (!counts.length) return el("p", { class: "muted", text: "No trials are recorded." });
  return el("div", { class: "ends" },
    el("div", { class: "strip", "aria-hidden": "true" }, counts.map(([outcome, n]) => {
      const part = el("span", { class: `fill ${outcome.name}`, "data-tip": `${plural(n, "config")}: ${outcome.label}` });
      part.style.flexGrow = n;
      return part;
    })),
    el("ul", { class: "keys" }, counts.map(([outcome, n]) =>
      el("li", {}, el("span", { class: `key ${outcome.name}`, "aria-hidden": "true", text: outcome.letter }), `${n.toLocaleString("en")} ${outcome.label}`))));
}
