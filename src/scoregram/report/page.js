const byId = (id) => document.getElementById(id);

function save(name, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Draws everything that the page holds; a page that is followed calls it again with new numbers.
function drawPage(page) {
  const maps = page.figures.filter(({ data }) => data.some(({ meta }) => meta in SCALES));
  for (const { data } of maps) data[0].colorscale = SCALES[data[0].meta](isDark);
  for (const { id, data, layout, config } of page.figures) Plotly.newPlot(id, data, layout, config);
  for (const button of document.querySelectorAll("button.csv")) {
    const figure = page.figures.find(({ id }) => id === button.dataset.plot);
    button.onclick = () => save(figure.id.replace(/-plot$/, ".csv"), figure.csv);
  }
  // Paper is narrower than a screen, and two figures fit on a sheet.
  const resize = (size) => page.figures.forEach(({ id, layout }) => Plotly.relayout(id, size ?? { autosize: true, width: null, height: layout.height }));
  const recolour = (dark) => maps.forEach(({ id, data }) => Plotly.restyle(id, { colorscale: [SCALES[data[0].meta](dark)] }));
  onbeforeprint = () => { resize({ width: 660, height: 310 }); recolour(false); };
  onafterprint = () => { resize(null); recolour(isDark); };
  if (page.glass) showGlass(page.glass);
  for (const link of document.querySelectorAll("a.to-rollouts")) link.onclick = () => showTruncated(page.glass);
}

// A step under the glass. All text from data is set as text, never as HTML.
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const diverging = (dark) => dark
  ? [[0, "#ff8a3d"], [0.5, "#1d2025"], [1, "#4aa8e0"]]
  : [[0, "#d55e00"], [0.5, "#ffffff"], [1, "#0072b2"]];
// shares: 0 has the colour of the page, in both schemes
const sequential = (dark) => dark
  ? [[0, "#1d2025"], [0.5, "#2f7fb5"], [1, "#d6ecfb"]]
  : [[0, "#f2f5f9"], [0.5, "#6aaed6"], [1, "#08306b"]];
const SCALES = { diverging, sequential };

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(Math.abs(value) < 0.1 ? 1 : 0)} %`);
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function drawMatrix(id, names, numbered, cosines, bars, barTitle, rightCount) {
  const places = names.map((_, i) => i);
  const shown = (name) => escaped(name.length > 20 ? `${name.slice(0, 19)}…` : name);
  const ticks = { tickmode: "array", tickvals: places, ticktext: names.map(shown) };
  const numbers = { ...ticks, ticktext: numbered.map((one) => `${one}`) };
  const labels = names.length <= 12;
  const data = [
    { type: "heatmap", z: cosines, x: places, y: places, zmin: -1, zmax: 1, colorscale: diverging(isDark), showscale: false, xgap: 1, ygap: 1,
      texttemplate: labels ? "%{z:.2f}" : "", textfont: { size: 10 }, hovertemplate: "%{y} and %{x}: cosine %{z:.3f}<extra></extra>" },
    { type: "bar", orientation: "h", x: bars, y: places, xaxis: "x2", marker: { color: "#808080" }, hovertemplate: `${barTitle} %{x:.3g}<extra></extra>` },
  ];
  const line = { type: "line", line: { color: isDark ? "#e6e8eb" : "#1c1e21", width: 2 } };
  const edge = rightCount - 0.5;
  const shapes = rightCount > 0 && rightCount < names.length
    ? [{ ...line, x0: -0.5, x1: names.length - 0.5, y0: edge, y1: edge }, { ...line, y0: -0.5, y1: names.length - 0.5, x0: edge, x1: edge }] : [];
  const plain = { zeroline: false, showgrid: false, automargin: true };
  const layout = {
    height: 430, margin: { l: 10, r: 10, t: 10, b: 10 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, shapes,
    font: { family: "system-ui, sans-serif", size: 11 }, hoverlabel: { bgcolor: "#ffffff", font: { color: "#222222" } },
    xaxis: { ...plain, ...numbers, domain: [0, 0.8], tickangle: 0, tickfont: { size: labels ? 11 : 8 } }, yaxis: { ...plain, ...ticks, autorange: "reversed" },
    xaxis2: { ...plain, domain: [0.83, 1], nticks: 3, title: { text: barTitle }, zeroline: true, zerolinecolor: "#808080" },
  };
  Plotly.react(id, data, layout, { displayModeBar: false, responsive: true });
}

function tokenColour(value, largest, signed) {
  const strength = Math.min(1, Math.abs(value) / (largest || 1)) * 0.6;
  const hue = !signed ? "128,128,128" : value >= 0 ? "0,114,178" : "213,94,0";
  return `rgba(${hue},${strength.toFixed(3)})`;
}

function tokenStrip(rollout, kind, largest) {
  const values = rollout[kind];
  const written = rollout.tokens !== undefined;
  const strip = element(written ? "pre" : "div", written ? "text" : "strip");
  values.forEach((value, i) => {
    const token = element("span", "token", written ? rollout.tokens[i] : "");
    token.style.background = tokenColour(value ?? 0, largest, kind !== "surprise");
    token.title = `${written ? rollout.tokens[i] : `token ${i + 1}`}: ${kind} ${number(value, 3)}`;
    strip.append(token);
  });
  return strip;
}

function rolloutCard(group, place, kind, largest) {
  const rollout = group.rollouts[place];
  const card = element("article", "rollout");
  const reward = group.rewards[place];
  const head = element("p", "head");
  head.append(element("b", "", `${place + 1}`), ` reward ${reward ?? "–"} · advantage ${number(group.advantages[place])} · ${group.lengths[place]} tokens`);
  if (rollout && !rollout.finished) head.append(element("span", "cut", " · cut off"));
  card.append(head);
  const share = group.shares[place];
  if (share !== undefined && share !== null) {
    const bar = element("div", "share");
    const fill = element("i", share < 0 ? "against" : "along");
    // one scale for the rollouts of a group: shares add up to 1 over all rollouts, and may be negative or above 1
    const low = Math.min(0, ...group.shares), high = Math.max(0, ...group.shares), width = high - low || 1;
    const zero = element("s", "");
    fill.style.left = `${100 * (Math.min(0, share) - low) / width}%`;
    fill.style.width = `${100 * Math.abs(share) / width}%`;
    zero.style.left = `${-100 * low / width}%`;
    bar.append(fill, zero);
    const against = share < 0 ? ", against the others" : "";
    card.append(bar, element("p", "caption", `${percent(share)} of the update of the ${group.share_of}${against}`));
  }
  const hasTokens = rollout && kind && rollout[kind] !== undefined;
  if (rollout && rollout.text !== undefined && !(hasTokens && rollout.tokens)) card.append(element("pre", "text", rollout.text));
  if (hasTokens) card.append(tokenStrip(rollout, kind, largest));
  return card;
}

const TOKEN_KINDS = {
  push: ["push of the update", "Blue tokens became more probable by the update of this step, orange ones less."],
  credit: ["credit", "Blue tokens have a positive advantage, orange ones a negative one."],
  surprise: ["surprise", "The darker, the less probable the token was when it was sampled."],
};

// A choice of what colours the tokens, if there is more than one; else the legend alone.
function showLegend(kinds, kind, choose) {
  const legend = byId("glass-legend");
  const say = () => {
    const choices = kinds.map((name) => {
      const button = element("button", name === kind ? "chosen" : "", TOKEN_KINDS[name][0]);
      button.setAttribute("aria-pressed", `${name === kind}`);
      button.onclick = () => { kind = name; tokenKind = name; say(); choose(name); };
      return button;
    });
    legend.replaceChildren(...(kinds.length ? ["Token colours: ", ...choices, ` ${TOKEN_KINDS[kind][1]}`] : []));
  };
  say();
}
let tokenKind = null; // the reader's choice, kept from group to group

// Of what the shares of a group's rollouts are shares.
function shareBasis({ shares, share_of }) {
  if (!shares.some((share) => share !== null)) return "";
  const total = shares.reduce((sum, share) => sum + (share ?? 0), 0);
  return share_of === "step"
    ? `Shares are of the update of the whole step; this group has ${percent(total)} of it, the other prompts have the rest.`
    : "Shares are of the update of this group alone and add up to 100 %; those of the whole step need the Gram between its prompts, which is not stored.";
}

function showGroup(group) {
  const names = group.rewards.map((reward, i) => `${i + 1}: ${reward ?? "–"}`);
  const top = Math.max(...group.rewards.filter((reward) => reward !== null));
  const right = group.rewards.filter((reward) => reward === top).length;
  byId("glass-gram").hidden = !group.cosines.length;
  if (group.cosines.length) drawMatrix("glass-gram", names, names.map((_, i) => i + 1), group.cosines, group.norms, "norm", right);
  byId("glass-prompt").textContent = group.prompt ?? group.id;
  byId("glass-answer").hidden = group.answer === null;
  byId("glass-answer").replaceChildren(element("b", "", "Expected answer: "), group.answer ?? "");
  byId("glass-basis").textContent = shareBasis(group);
  const stored = group.rollouts.filter((rollout) => rollout);
  const kinds = Object.keys(TOKEN_KINDS).filter((name) => stored.some((rollout) => rollout[name] !== undefined));
  const showRollouts = (kind) => {
    const values = stored.flatMap((rollout) => rollout[kind] ?? []).map((value) => Math.abs(value ?? 0));
    const largest = values.reduce((most, value) => Math.max(most, value), 0);
    byId("glass-rollouts").replaceChildren(...group.rewards.map((_, i) => rolloutCard(group, i, kind, largest)));
  };
  const kind = kinds.includes(tokenKind) ? tokenKind : kinds[0];
  showLegend(kinds, kind, showRollouts);
  showRollouts(kind);
}

// One name for a prompt in the list of groups and in the map: its number in the step, and the beginning of its text.
const promptName = (place, text) => `${place}: ${text.replace(/\s+/g, " ")}`;

function showBatch(step) {
  byId("glass-interference").hidden = !step.batch;
  if (!step.batch) return;
  const { prompts, cosines, shares } = step.batch;
  const moved = prompts.map((_, i) => i).filter((i) => cosines[i][i] !== null); // prompts with an update
  const among = moved.map((i) => moved.map((j) => cosines[i][j]));
  const numbered = moved.map((i) => i + 1);
  drawMatrix("glass-batch", moved.map((i) => promptName(i + 1, prompts[i])), numbered, among, moved.map((i) => shares[i]), "share of step", 0);
}

function showStep(step) {
  byId("glass-number").textContent = `${step.step}`;
  byId("glass-warning").textContent = step.failed ? "The self-check of this step failed: do not trust its cosines." : "";
  const choice = byId("glass-group");
  choice.replaceChildren(...step.groups.map((group, i) => {
    const option = element("option", "", `${promptName(group.number, (group.prompt ?? group.id).slice(0, 60))} (${group.outcome})`);
    option.value = `${i}`;
    return option;
  }));
  // First shown is the group whose rewards are split most evenly: there is most to see.
  const evenness = ({ rewards }) => { const top = Math.max(...rewards); return Math.min(...[true, false].map((is) => rewards.filter((one) => (one === top) === is).length)); };
  const even = step.groups.map(evenness);
  choice.value = `${Math.max(0, even.indexOf(Math.max(...even)))}`;
  choice.onchange = () => showGroup(step.groups[Number(choice.value)]);
  if (step.groups.length) choice.onchange();
  showBatch(step);
}

// The last step and group with a truncated rollout; nothing changes if there is none.
function showTruncated(steps) {
  const isTruncated = (group) => group.rollouts.some((rollout) => rollout && !rollout.finished);
  const at = steps.findLastIndex((step) => step.groups.some(isTruncated));
  if (at < 0) return;
  byId("glass-step").value = `${at}`;
  byId("glass-step").oninput();
  byId("glass-group").value = `${steps[at].groups.findIndex(isTruncated)}`;
  byId("glass-group").onchange();
}

function showGlass(steps) {
  const slider = byId("glass-step");
  slider.max = `${steps.length - 1}`;
  slider.value = slider.max;
  slider.oninput = () => showStep(steps[Number(slider.value)]);
  slider.oninput();
}
