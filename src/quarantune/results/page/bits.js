// How often each tunable changes the bits of the output: a bar in a frame that stands for all pairs.
function drawBits() {
  const host = clear($("bits-chart")), rows = problem.bits.map(([name, differ, pairs]) =>
    [short(name, 14), differ / pairs, differ ? "was" : "best", `${name} changes bits in ${differ} of ${plural(pairs, "pair")} of configs that differ in it only`]);
  $("bits").hidden = !rows.length;
  if ($("bits").hidden) return;
  $("bits-finding").textContent = `Whether a tunable changes the bits: ${problem.bitsFinding}.`;
  host.append(barChart(host, rows, 1, percent, true),
    asTable(["tunable", "pairs with other bits", "pairs"], problem.bits));
}
