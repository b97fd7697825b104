// Assembles the page and connects the controls in its header.
const sections = [["Summary", summary], ["Curves", curves], ["Time", phases], ["Timeline", timeline], ["Device", device], ["Samples", samples], ["Configuration", configuration], ["Environment", environment]];
for (const [title, make] of sections) {
  const section = make();
  if (!section) continue;
  $("page").append(section);
  $("nav").append(el("a", { href: `#${section.id}` }, title));
}
$("foot").textContent = `Created ${data.made} by rlframework ${data.version} from ${data.runs.map((run) => run.path).join(", ")}`;

const chips = data.runs.map((run, index) => {
  const only = () => state.shown.every((shown, i) => shown === (i === index));
  const set = (values) => { state.shown = values; chips.forEach((chip, i) => chip.setAttribute("aria-pressed", values[i])); notify("draw"); notify("runs"); };
  const press = (event) => {
    if (event.shiftKey || event.altKey) set(state.shown.map((_, i) => only() || i === index));
    else set(state.shown.map((shown, i) => (i === index ? !shown : shown)));
  };
  return el("button", { type: "button", class: "chip", "aria-pressed": "true", title: `${run.path}\nClick to show or hide, shift-click to show only this run`, onclick: press }, runKey(index), el("span", {}, run.name));
});
$("legend").append(...chips);

// the slider is logarithmic in the span, from no smoothing to half of the longest run
const LONGEST = Math.max(100, ...data.runs.map((run) => (run.clock[0].at(-1) ?? 0) / 2));
const spanOf = (place) => Math.round(LONGEST ** (place / 100));
$("smooth").value = Math.round(100 * Math.log(state.span) / Math.log(LONGEST));
let scheduled = false;
function scheduleDraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; notify("draw"); });
}
function showSpan() {
  $("smooth-value").textContent = state.span > 1 ? `${state.span} steps` : "off";
}
$("smooth").addEventListener("input", (event) => { state.span = spanOf(Number(event.target.value)); showSpan(); scheduleDraw(); });
showSpan();
$("along").addEventListener("change", (event) => { state.along = event.target.value; state.hover = null; zoom(null); });
$("robust").addEventListener("change", (event) => { state.robust = event.target.checked; notify("draw"); });
$("unzoom").addEventListener("click", () => zoom(null));

const schemes = ["", "light", "dark"];
function setScheme(scheme) {
  document.documentElement.dataset.scheme = scheme;
  $("scheme").textContent = { "": "◐ auto", light: "☼ light", dark: "☾ dark" }[scheme];
}
$("scheme").addEventListener("click", () => setScheme(schemes[(schemes.indexOf(document.documentElement.dataset.scheme) + 1) % 3]));
setScheme("");
