// What a run's device did in its profiled steps, and what its memory held: bars of parts.
function device() {
  const cards = data.runs.flatMap((run, index) => run.breakdowns.map((each) => ({ index, node: breakdownCard(each, index) })));
  if (!cards.length) return null;
  listeners.runs.push(() => cards.forEach(({ index, node }) => { node.hidden = !state.shown[index]; }));
  return el("section", { id: "device" }, el("h2", {}, "Device"), el("div", { class: "grid" }, cards.map(({ node }) => node)));
}

function breakdownCard({ title, names, bars, adds_up: addsUp }, index) {
  const shown = (value) => (title.endsWith("MiB") ? number(value) : seconds(value));
  const paint = (n) => (names[n] === "idle" || names[n] === "other" ? "c-rest" : `p${n % 6}`);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  // a bar for each step, or for each part where parts do not add up
  const rows = addsUp ? bars.map(([step, values]) => [`step ${step}`, values]) : names.map((name, n) => [name, bars[0][1].map((value, m) => (m === n ? value : 0))]).filter(([, values]) => sum(values));
  const longest = Math.max(...rows.map(([, values]) => sum(values))) || 1;
  const cells = rows.flatMap(([label, values]) => {
    const share = el("div", { class: "share" }, values.map((value, n) => {
      const part = el("i", { class: paint(n), title: `${names[n]}: ${shown(value)}` });
      part.style.flex = `${value / longest} 0 0`;
      part.hidden = !value;
      return part;
    }), spacer(1 - sum(values) / longest));
    return [el("span", {}, label), share, el("b", {}, shown(sum(values)))];
  });
  const means = names.map((_, n) => sum(bars.map(([, values]) => values[n])) / bars.length);
  const keys = names.map((name, n) => el("span", {}, el("span", { class: `sw ${paint(n)}` }), `${name} `, el("b", {}, `${(100 * means[n] / (sum(means) || 1)).toFixed(1)}%`)));
  const where = addsUp ? "" : ` (step ${bars[0][0]})`;
  const head = el("header", {}, el("h4", {}, title + where), data.runs.length > 1 ? runName(index) : null);
  return el("article", { class: "card chart" }, head, el("div", { class: "bars" }, cells), addsUp ? el("p", { class: "keys" }, keys) : null);
}

function spacer(share) {
  const node = el("span");
  node.style.flex = `${Math.max(share, 0)} 0 0`;
  return node;
}
