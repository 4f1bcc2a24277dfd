"use strict";
// The page of a run. Live, it asks for news every second; in a report all data is in the page.
(() => {
  const given = JSON.parse(document.getElementById("data").textContent);
  const period = 1000;  // milliseconds between questions
  const find = id => document.getElementById(id);
  const view = {log: false, range: null};
  let runs = [];         // {name, look, shown, series, ...}; the first is the page's own
  let plotHosts = [];    // {legend, host} by plot
  let phaseHosts = [];   // {bars, slow, members} by run

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.filter(child => child !== null && child !== undefined));
    return made;
  }

  // --- drawing

  // Puts new content there if it differs from what is there, but not while somebody selects text in it.
  const contents = new WeakMap();
  function update(host, key, children) {
    const text = JSON.stringify(key);
    if (contents.get(host) === text) return;
    const selection = getSelection();
    if (!selection.isCollapsed && host.contains(selection.anchorNode)) return;
    contents.set(host, text);
    host.replaceChildren(...children());
  }

  function pairs(series, key) {
    if (!series) return [];
    if (key === "val_loss") return series.val_loss;
    return series.step.map((step, i) => [step, series[key][i]]);
  }

  function eventSteps() {
    const own = runs[0];
    return (own && own.events || []).filter(event => !["started", "saved", "ended"].includes(event.event))
      .map(event => ({step: event.step, name: event.event}));
  }

  function drawPlots() {
    if (plotHosts.length === 0) {
      plotHosts = given.plots.map(plot => {
        const host = element("div");
        const legend = element("span", {class: "legend"});
        find("plots").append(element("figure", {class: plot.large ? "large" : ""},
          element("figcaption", {}, element("span", {}, plot.title + " ", element("small", {}, plot.unit)), legend), host));
        return {host, legend};
      });
    }
    const shown = runs.filter(run => run.shown && run.series);
    const choose = range => { view.range = range; find("zoom-out").hidden = range === null; drawPlots(); };
    given.plots.forEach((plot, i) => {
      const curves = [];
      for (const run of shown) {
        for (const series of plot.series) {
          const own = plot.series.length > 1 ? series.label : "";
          const label = [shown.length > 1 ? run.name : "", own].filter(Boolean).join(" ") || series.label;
          curves.push({label, points: pairs(run.series, series.key), look: run.look, marked: series.marked});
        }
      }
      const {host, legend} = plotHosts[i];
      const look = shown.length > 0 ? shown[0].look : 0;
      // What each run looks like stands beside its name.
      update(legend, look, () => plot.series.length < 2 ? [] : plot.series.map(series =>
        element("span", {}, Plots.sample(look, series.marked), series.label)));
      Plots.curves(host, plot, curves, {...view, events: eventSteps()}, choose);
    });
  }

  function figures(run) {
    const list = [["step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)], ["loss", Plots.short(run.loss)]];
    if (run.val_loss !== null) list.push(["validation", Plots.short(run.val_loss)]);
    if (run.val_bits_per_byte !== null) list.push(["bits per byte", Plots.short(run.val_bits_per_byte)]);
    if (run.val_accuracy !== null) list.push(["correct tokens", `${(run.val_accuracy * 100).toFixed(1)} %`]);
    list.push(["tokens/s", Plots.short(run.tokens_per_s)]);
    if (run.seconds_left !== null && run.state === "running") list.push(["time left", Plots.duration(run.seconds_left)]);
    list.push(["workers", String(run.ranks.length)], ["tokens", Plots.short(run.tokens)], ["passes over the data", run.epoch.toPrecision(2)]);
    const hidden = share(run);
    if (hidden !== null) list.push(["communication hidden", `${Math.round(hidden * 100)} %`]);
    update(find("figures"), list, () => list.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    const bar = find("progress");
    bar.hidden = !run.steps;
    if (run.steps) bar.value = run.step / run.steps;
  }

  // How much of communication the backward pass hides, over all ranks.
  function share(run) {
    let hidden = 0, open = 0;
    for (const rank of run.ranks) {
      hidden += rank.phases ? rank.phases.hidden || 0 : 0;
      open += rank.phases ? rank.phases.communication || 0 : 0;
    }
    return run.ranks.length > 1 && hidden + open > 0 ? hidden / (hidden + open) : null;
  }

  const when = event => event.time ? new Date(event.time * 1000).toLocaleTimeString() : "";

  function words(event) {
    const who = (event.who || []).join(", ");
    const how = event.how ? `: ${event.how}` : "";
    const workers = event.workers === undefined ? "" : `; ${event.workers} worker${event.workers === 1 ? "" : "s"}`;
    const took = event.seconds === undefined ? "" : `, after ${Plots.duration(event.seconds)}`;
    switch (event.event) {
      case "started": return `the run of ${event.steps} steps starts${workers}`;
      case "saved": return `${event.name} is on disk`;
      case "halted": return `halted: ${event.how}`;
      case "ended": return `${event.how}${event.hash ? `, weights ${event.hash}` : ""}`;
      case "went back": return `back to ${event.back_to ? `the checkpoint of step ${event.back_to}` : "the start"}${workers}${took}`;
      default: return `${who}${how}${event.again ? "; the step is computed again" : ""}${workers}${took}`;
    }
  }

  // Cells are texts, or {code: text}.
  function table(host, headings, rows, none) {
    update(host, [headings, rows], () => {
      const body = rows.map(row => element("tr", {}, ...row.map(cell =>
        element("td", {}, cell.code === undefined ? cell : element("code", {}, cell.code)))));
      if (body.length === 0) body.push(element("tr", {}, element("td", {colspan: headings.length}, none)));
      return [element("thead", {}, element("tr", {}, ...headings.map(name => element("th", {scope: "col"}, name)))), element("tbody", {}, ...body)];
    });
  }

  // Newest first; of several runs, one after the other.
  function drawEvents(shown) {
    const several = shown.length > 1;
    const rows = (chosen, most, cells) => shown.flatMap(run => run.events.filter(chosen).slice(-most).reverse()
      .map(event => [...(several ? [run.name] : []), when(event), String(event.step), ...cells(event)]));
    const headings = [...(several ? ["run"] : []), "time", "step"];
    table(find("events"), [...headings, "event", ""], rows(event => event.event !== "saved", 200, event => [event.event, words(event)]), "none");
    table(find("checkpoints"), [...headings, "name", "hash of the weights"],
      rows(event => event.event === "saved", 50, event => [event.name, {code: event.hash}]), "none yet");
  }

  // Members and bars of all runs that are shown; a report may have several.
  function drawPhases(shown, resized) {
    update(find("phases"), shown.map(run => run.name), () => {
      phaseHosts = shown.map(() => ({bars: element("div"), slow: element("p"), members: element("table")}));
      return phaseHosts.flatMap(({bars, slow, members}, i) =>
        [shown.length > 1 ? element("h3", {}, shown[i].name) : null, bars, slow, element("div", {class: "wide"}, members)].filter(Boolean));
    });
    for (const [i, run] of shown.entries()) {
      const {bars, slow, members} = phaseHosts[i];
      // Who points at a bar reads what it is; a finger that has touched one points there for ever.
      const read = bars.matches(":hover") && matchMedia("(hover: hover)").matches;
      if (resized || !read || !bars.hasChildNodes()) Plots.bars(bars, run.ranks, run.straggler);
      slow.textContent = run.straggler
        ? `rank ${run.straggler.rank} takes ${Math.round(run.straggler.slower * 100)} % longer to compute than the median of the others` : "";
      slow.hidden = !run.straggler;
      table(members, ["rank", "member", "lanes"], run.ranks.map(rank => [String(rank.rank), rank.name || "", rank.lanes === undefined ? "" : String(rank.lanes)]), "none yet");
    }
  }

  function flat(value, prefix, rows) {
    for (const [name, each] of Object.entries(value || {})) {
      const path = prefix ? `${prefix}.${name}` : name;
      if (Array.isArray(each)) rows.push([path, each.map(String).join(" ")]);
      else if (each !== null && typeof each === "object") flat(each, path, rows);
      else rows.push([path, String(each)]);
    }
    return rows;
  }

  function drawSettings(shown) {
    const groups = shown.filter(run => run.start).flatMap(run => {
      const start = run.start;
      const settings = start.settings || {};
      const of = shown.length > 1 ? `${run.name}: ` : "";
      return [[`${of}machine`, {...start.machine, version: start.version}], [`${of}options as given`, settings.options],
        [`${of}run`, {...settings, options: undefined, run: undefined}], [`${of}all settings`, settings.run]];
    });
    update(find("settings"), groups, () => groups.filter(([, value]) => value).map(([name, value]) => {
      const rows = flat(value, "", []).filter(([, text]) => text !== "undefined");
      return element("table", {}, element("thead", {}, element("tr", {}, element("th", {colspan: 2}, name))),
        element("tbody", {}, ...rows.map(([key, text]) => element("tr", {}, element("th", {scope: "row"}, key), element("td", {}, text)))));
    }));
  }

  // One column for each run; what differs between them is in the rows.
  function compare(all) {
    find("compared").hidden = all.length < 2;
    if (all.length < 2) return;
    const seconds = run => run.series.seconds.reduce((sum, each) => sum + each, 0) * run.series.stride;
    const end = run => run.events.filter(event => event.event === "ended" && event.hash).pop();
    const rows = [["state", stateOf], ["steps", run => `${run.step}${run.steps ? ` of ${run.steps}` : ""}`], ["loss", run => Plots.short(run.loss)],
      ["validation loss", run => Plots.short(run.val_loss)], ["time in steps", run => Plots.duration(seconds(run))],
      ["tokens/s, mean", run => Plots.short(run.tokens / seconds(run))], ["workers", run => String(run.ranks.length)],
      ["workers lost", run => String(run.events.filter(event => ["lost", "expelled"].includes(event.event)).length)],
      ["weights", run => end(run) ? {code: end(run).hash.slice(0, 23)} : "–"],
      ["host", run => run.start && run.start.machine ? run.start.machine.host : "–"]];
    const settings = all.map(run => new Map(flat(run.start && run.start.settings, "", [])));
    const keys = [...new Set(settings.flatMap(each => [...each.keys()]))];
    for (const key of keys) {
      if (new Set(settings.map(each => each.get(key))).size > 1) rows.push([key, (run, i) => settings[i].get(key) ?? "–"]);
    }
    table(find("comparison"), ["", ...all.map(run => run.name)], rows.map(([name, value]) => [name, ...all.map(value)]), "");
  }

  // A report cannot know whether a run that has not ended is under way.
  function stateOf(run) {
    if (run.state === "unknown") return given.live ? "starting" : "unknown";
    return !given.live && run.state === "running" ? "not ended" : run.state;
  }

  const hasEnded = run => Boolean(run) && ["done", "stopped", "halted"].includes(run.state);

  function draw(resized = false) {
    const own = runs[0];
    if (!own || !own.ranks) return;
    document.title = `${own.name} ${own.steps ? `${own.step}/${own.steps}` : own.step} – Lockstep`;
    find("name").textContent = given.live || runs.length === 1 ? own.name : "Report";
    find("state").textContent = stateOf(own);
    find("state").hidden = !given.live && runs.length > 1;
    const shown = given.live ? [own] : runs;
    find("figures").hidden = shown.length > 1;
    if (shown.length === 1) figures(own);
    drawPlots();
    drawPhases(shown, resized);
    drawEvents(shown);
    drawSettings(shown);
    document.documentElement.dataset.step = own.step;  // for those who drive the page
  }

  // --- news

  async function ask(path) {
    const answer = await fetch(path, {cache: "no-store"});
    if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
    return answer.json();
  }

  // The points of a run that are new. The last one known may have been a mean that was not complete.
  async function askSteps(run, query) {
    const known = run.series;
    const count = known ? known.step.length : 0;
    const after = count > 1 ? known.step[count - 2] : 0;
    const news = await ask(`api/steps?after=${after}${query}`);
    if (!known || news.stride !== known.stride || after === 0) {
      run.series = after === 0 ? news : await ask(`api/steps?after=0${query}`);
      return;
    }
    for (const key of Object.keys(known)) {
      if (key === "stride") continue;
      if (key === "val_loss") known[key] = known[key].filter(([step]) => step <= after).concat(news[key]);
      else known[key] = known[key].slice(0, count - 1).concat(news[key]);
    }
  }

  async function askOwn() {
    const run = await ask("api/run");
    if (runs.length === 0) runs.push({look: 0, shown: true});
    const own = runs[0];
    if (own.series && run.step < own.step) own.series = null;  // it went on from an earlier step
    Object.assign(own, run);
    await askSteps(own, "");
  }

  async function askOthers() {
    for (const run of runs.slice(1)) {
      if (run.shown) await askSteps(run, `&run=${encodeURIComponent(run.name)}`);
    }
  }

  function offerRuns(names) {
    for (const name of names) {
      if (runs.some(run => run.name === name)) continue;
      runs.push({name, look: runs.length, shown: false, events: []});
    }
    const host = find("runs");
    host.hidden = runs.length < 2;
    if (host.querySelectorAll("label").length === runs.length) return;
    host.querySelectorAll("label").forEach(label => label.remove());
    for (const run of runs) {
      const box = element("input", {type: "checkbox"});
      box.checked = run.shown;
      box.addEventListener("change", async () => {
        run.shown = box.checked;
        if (given.live) await askOthers().catch(() => {});
        drawPlots();
      });
      host.append(element("label", {}, box, Plots.sample(run.look, true), run.name));
    }
  }

  async function turn(count) {
    try {
      if (!document.hidden) {
        await askOwn();
        if (count % 10 === 0) offerRuns((await ask("api/runs")).runs);
        await askOthers();
        find("note").hidden = true;
        draw();
      }
    } catch (problem) {
      const gone = problem instanceof TypeError;  // nobody answers
      const cut = "The run does not answer: it has ended, or the way to it is cut. What is shown is the last that was known.";
      find("note").textContent = !gone ? problem.message : hasEnded(runs[0]) ? "The run has ended, and its page with it." : cut;
      find("note").hidden = false;
      if (gone && !hasEnded(runs[0])) find("state").textContent = "no answer";
    }
    setTimeout(() => turn(count + 1), period);
  }

  function begin() {
    find("version").textContent = given.version;
    // The secret is in a cookie by now, and need not be in the address that others may see.
    if (given.live && location.search) history.replaceState(null, "", location.pathname);
    find("log").addEventListener("change", event => { view.log = event.target.checked; drawPlots(); });
    find("zoom-out").addEventListener("click", () => { view.range = null; find("zoom-out").hidden = true; drawPlots(); });
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      draw(true);
    });
    if (given.live) {
      turn(0);
      return;
    }
    runs = given.runs.map((run, i) => ({...run, look: i, shown: true}));
    offerRuns([]);
    compare(runs);
    draw();
  }

  begin();
})();
