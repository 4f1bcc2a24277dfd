"use strict";
// Plots as SVG, drawn for the width that they have. Curves differ by dashes and marks, bars by hatching, so that none of
// them needs colour.
const Plots = (() => {
  const names = "http://www.w3.org/2000/svg";
  const colours = 8;
  const dashes = ["", "7 3", "2 3", "10 3 2 3", "5 2", "1 2", "12 4", "4 4"];
  const marks = [
    (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`,
    (x, y, r) => `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
    (x, y, r) => `M${x} ${y - r - 1}l${r + 1} ${2 * r}h${-2 * r - 2}z`,
    (x, y, r) => `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z`,
  ];

  function make(parent, tag, attributes = {}, text) {
    const element = document.createElementNS(names, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  function short(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e12) return (value / 1e12).toPrecision(3) + "T";
    if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
    if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(4)));
  }

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
    if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60) return `${minutes}m${String(Math.round(seconds % 60)).padStart(2, "0")}s`;
    return `${Math.floor(minutes / 60)}h${String(minutes % 60).padStart(2, "0")}m`;
  }

  // Round numbers, about `count` of them, that cover low to high.
  function ticks(low, high, count) {
    const span = high - low || Math.abs(high) || 1;
    const power = 10 ** Math.floor(Math.log10(span / count));
    const step = [1, 2, 5, 10].map(each => each * power).find(each => span / each <= count) || power * 10;
    const values = [];
    for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(Number(value.toPrecision(12)));
    return values;
  }

  // Powers of ten, and 2 and 5 times them while there are few; even steps where that gives fewer than three.
  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const values = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); ++power) {
      for (const times of decades > 3 ? [1] : [1, 2, 5]) values.push(Number((times * 10 ** power).toPrecision(12)));
    }
    const within = values.filter(value => value >= low * 0.999 && value <= high * 1.001);
    return within.length > 2 ? within : ticks(low, high, 5).filter(value => value > 0);
  }

  // Of more points than there are pixels, the lowest and the highest of each pixel, in their order.
  function thinned(points, x) {
    if (points.length < 3000) return points;
    const kept = [];
    let column = null, low = null, high = null;
    const flush = () => {
      if (low === null) return;
      kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
    };
    for (const point of points) {
      const at = Math.round(x(point[0]));
      if (at !== column) {
        flush();
        column = at;
        low = high = point;
      }
      if (point[1] < low[1]) low = point;
      if (point[1] > high[1]) high = point;
    }
    flush();
    return kept;
  }

  const colour = index => `var(--c${index % colours})`;
  const dashesOf = look => dashes[look % dashes.length];

  function mark(parent, look, x, y) {
    const hollow = look % (2 * marks.length) >= marks.length;
    make(parent, "path", {class: "mark", d: marks[look % marks.length](x, y, 3.2), fill: hollow ? "var(--paper)" : colour(look), stroke: colour(look)});
  }

  // How a curve looks, to stand beside its name.
  function sample(look, marked) {
    const svg = document.createElementNS(names, "svg");
    svg.setAttribute("class", "sample");
    svg.setAttribute("viewBox", "0 0 36 12");
    svg.setAttribute("aria-hidden", "true");
    make(svg, "path", {class: "curve", d: "M1 6h34", stroke: colour(look), "stroke-dasharray": dashesOf(look)});
    if (marked) mark(svg, look, 18, 6);
    return svg;
  }

  // Draws `plot` into `host`. curves: [{label, points: [[step, value]], look, marked}], `look` the number of the run.
  // view: {log, range: [first, last] or null, events: [{step, name}]}. choose(range) is called when somebody drags over it.
  function curves(host, plot, curvesOfPlot, view, choose) {
    const width = Math.max(240, Math.round(host.clientWidth || 640));
    const height = plot.large && width > 500 ? 300 : 190;
    const box = {left: 52, right: width - 10, top: plot.large ? 18 : 8, bottom: height - 24};
    const svg = document.createElementNS(names, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.dataset.plot = plot.id;
    const log = Boolean(view.log && plot.log);

    const all = curvesOfPlot.map(curve => curve.points).filter(points => points.length > 0);
    const whole = [Math.min(...all.map(points => points[0][0])), Math.max(...all.map(points => points[points.length - 1][0]))];
    const range = all.length === 0 ? [0, 1] : view.range || whole;
    if (range[0] === range[1]) range[1] = range[0] + 1;
    const shown = curvesOfPlot.map(curve => ({...curve, points: curve.points.filter(
      ([step, value]) => step >= range[0] && step <= range[1] && value !== null && (!log || value > 0))}));
    let low = Infinity, high = -Infinity;
    for (const curve of shown) {
      for (const [, value] of curve.points) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    const empty = low > high;
    if (empty) [low, high] = [log ? 0.1 : 0, 1];
    if (plot.from_zero && !log) low = Math.min(0, low);
    if (low === high) [low, high] = log ? [low / 1.5, high * 1.5] : [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
    if (!log && !plot.from_zero) [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
    const scale = log ? Math.log10 : value => value;
    const x = step => box.left + (step - range[0]) / (range[1] - range[0]) * (box.right - box.left);
    const y = value => box.bottom - (scale(value) - scale(low)) / (scale(high) - scale(low)) * (box.bottom - box.top);

    for (const value of log ? logTicks(low, high) : ticks(low, high, 6)) {
      make(svg, "line", {class: "grid", x1: box.left, x2: box.right, y1: y(value), y2: y(value)});
      make(svg, "text", {x: box.left - 6, y: y(value) + 4, "text-anchor": "end"}, short(value));
    }
    for (const step of ticks(range[0], range[1], Math.max(5, Math.floor(width / 90))).filter(Number.isInteger)) {
      make(svg, "text", {x: x(step), y: box.bottom + 16, "text-anchor": "middle"}, short(step));
    }
    make(svg, "rect", {class: "frame", x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top});
    const labels = [];  // above the large plot only; lines that are close share one
    for (const {step, name} of view.events || []) {
      if (step < range[0] || step > range[1]) continue;
      const line = make(svg, "line", {class: "event", x1: x(step), x2: x(step), y1: box.top, y2: box.bottom});
      make(line, "title", {}, `${name}, step ${step}`);
      const last = labels[labels.length - 1];
      if (last && x(step) - last.x < 50) last.names.add(name);
      else labels.push({x: x(step), names: new Set([name])});
    }
    let free = 0;
    for (const label of plot.large ? labels : []) {
      const text = [...label.names].join(", ");
      const half = text.length * 3;
      if (label.x - half < free) continue;
      make(svg, "text", {class: "event", x: Math.min(label.x, box.right - half), y: box.top - 5, "text-anchor": "middle"}, text);
      free = label.x + half + 8;
    }
    for (const curve of shown) {
      if (curve.points.length === 0) continue;
      const points = thinned(curve.points, x);
      const path = points.map(([step, value], i) => `${i === 0 ? "M" : "L"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      make(svg, "path", {class: "curve", d: path, stroke: colour(curve.look), "stroke-dasharray": dashesOf(curve.look),
        "stroke-opacity": curve.marked ? 0.5 : 1, "data-points": curve.points.length});
      if (!curve.marked && points.length > 1) continue;
      for (const [step, value] of points.slice(-200)) mark(svg, curve.look, x(step), y(value));
    }
    if (empty) make(svg, "text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, "nothing yet");

    const entries = shown.filter(curve => curve.points.length > 0);
    const last = entries.map(curve => `${curve.label} ${short(curve.points[curve.points.length - 1][1])}`).join(", ");
    svg.setAttribute("aria-label", `${plot.title} from step ${short(range[0])} to ${short(range[1])}: ${last || "nothing yet"}`);
    const pointer = pointers.get(host) || watchPointer(host);
    pointer.drawn = {svg, layer: make(svg, "g"), box, x, y, range, shown, width, choose};
    host.replaceChildren(svg);
    drawPointer(pointer);
  }

  // What the pointer does over a plot outlives the drawing, which is replaced with every news: {begin: the step where a drag
  // began, at: where the pointer is, drawn: the drawing}.
  const pointers = new WeakMap();

  function stepAt({svg, box, range, width}, clientX) {
    const bounds = svg.getBoundingClientRect();
    const place = (clientX - bounds.left) * width / bounds.width;
    return range[0] + (Math.min(box.right, Math.max(box.left, place)) - box.left) / (box.right - box.left) * (range[1] - range[0]);
  }

  function watchPointer(host) {
    const pointer = {begin: null, at: null, drawn: null};
    pointers.set(host, pointer);
    const leave = () => {
      pointer.begin = pointer.at = null;
      drawPointer(pointer);
    };
    host.addEventListener("pointerdown", event => {
      if (event.button !== 0) return;
      host.setPointerCapture(event.pointerId);  // a drag may end beyond the plot
      pointer.begin = stepAt(pointer.drawn, event.clientX);
    });
    host.addEventListener("pointermove", event => {
      pointer.at = event.clientX;
      drawPointer(pointer);
    });
    host.addEventListener("pointerup", event => {
      const {begin, drawn: {x, choose}} = pointer;
      const end = stepAt(pointer.drawn, event.clientX);
      leave();
      if (begin !== null && Math.abs(x(end) - x(begin)) > 6 && choose) choose([Math.floor(Math.min(begin, end)), Math.ceil(Math.max(begin, end))]);
    });
    host.addEventListener("pointerleave", leave);
    host.addEventListener("pointercancel", leave);
    host.addEventListener("dblclick", () => pointer.drawn.choose && pointer.drawn.choose(null));
    return pointer;
  }

  // Of points in order, the one nearest to a step.
  function nearest(points, step) {
    let from = 0, to = points.length - 1;
    while (to - from > 1) {
      const middle = (from + to) >> 1;
      if (points[middle][0] < step) from = middle; else to = middle;
    }
    return points[Math.abs(points[from][0] - step) < Math.abs(points[to][0] - step) ? from : to];
  }

  // What is under the pointer, or the part that is being chosen.
  function drawPointer({begin, at, drawn}) {
    const {layer, box, x, y, shown} = drawn;
    layer.replaceChildren();
    if (at === null) return;
    const step = stepAt(drawn, at);
    if (begin !== null) {
      make(layer, "rect", {class: "chosen", x: Math.min(x(begin), x(step)), width: Math.abs(x(step) - x(begin)), y: box.top, height: box.bottom - box.top});
      return;
    }
    const lines = [];
    let found = null;
    for (const curve of shown) {
      if (curve.points.length === 0) continue;
      const point = nearest(curve.points, step);
      if (found === null) found = point[0];
      lines.push(`${curve.label} ${short(point[1])}`);
      make(layer, "circle", {cx: x(point[0]), cy: y(point[1]), r: 3, fill: colour(curve.look)});
    }
    if (found === null) return;
    lines.unshift(`step ${found}`);
    make(layer, "line", {class: "hair", x1: x(found), x2: x(found), y1: box.top, y2: box.bottom});
    const wide = Math.max(...lines.map(line => line.length)) * 6.4 + 14;
    const left = x(found) + 8 + wide > box.right ? x(found) - 8 - wide : x(found) + 8;
    make(layer, "rect", {class: "tip", x: left, y: box.top + 4, width: wide, height: lines.length * 15 + 6, rx: 3});
    lines.forEach((line, i) => make(layer, "text", {x: left + 7, y: box.top + 18 + i * 15, class: "strong"}, line));
  }

  // The phases of a step in the order in which they are stacked, and how each is hatched.
  const phases = ["data", "forward", "backward", "communication", "optimizer", "verify", "save"];
  const hatching = {
    data: "M0 4h8", forward: "", backward: "M0 8L8 0M-2 2L2 -2M6 10L10 6", communication: "M0 0L8 8M-2 6L2 10M6 -2L10 2", optimizer: "M4 0v8",
    verify: "M0 4h8M4 0v8", save: "M0 0L8 8M0 8L8 0",
  };

  function patterns(svg) {
    const definitions = make(svg, "defs");
    phases.forEach((phase, i) => {
      const pattern = make(definitions, "pattern", {id: `hatch-${phase}`, width: 8, height: 8, patternUnits: "userSpaceOnUse"});
      make(pattern, "rect", {width: 8, height: 8, fill: colour(i), "fill-opacity": 0.85});
      if (hatching[phase]) make(pattern, "path", {d: hatching[phase], stroke: "var(--paper)", "stroke-width": 1.4});
    });
  }

  // Where the time of a step goes, a bar for each rank. ranks: [{rank, name, lanes, phases: {data: seconds, ...}}]. Communication
  // that the backward pass hides takes no time of its own: it is the line below a bar.
  function bars(host, ranks, straggler) {
    const width = Math.max(240, Math.round(host.clientWidth || 640));
    const told = ranks.filter(rank => rank.phases);
    const total = rank => phases.reduce((sum, phase) => sum + (rank.phases[phase] || 0), 0);
    const longest = Math.max(1e-9, ...told.map(total));
    const used = phases.filter(phase => told.some(rank => rank.phases[phase] > longest / 1000));
    const hidden = told.some(rank => rank.phases.hidden > 0);
    const left = 64, right = width - (straggler ? 112 : 76), row = 34;
    const keys = [...used, ...(hidden ? ["hidden"] : [])];
    const across = Math.max(1, Math.floor((width - left) / 128));
    const top = 8 + Math.ceil(keys.length / across) * 18 + 6;
    const svg = document.createElementNS(names, "svg");
    const height = top + Math.max(1, told.length) * row + 8;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.dataset.plot = "phases";
    patterns(svg);
    keys.forEach((phase, i) => {
      const x = left + i % across * 128, y = 8 + Math.floor(i / across) * 18;
      if (phase === "hidden") make(svg, "line", {x1: x, x2: x + 16, y1: y + 6, y2: y + 6, stroke: "var(--ink)", "stroke-width": 2, "stroke-dasharray": "3 2"});
      else make(svg, "rect", {x, y, width: 16, height: 12, fill: `url(#hatch-${phase})`});
      make(svg, "text", {x: x + 22, y: y + 10}, phase === "hidden" ? "hidden comm." : phase);
    });
    const sentences = [];
    told.forEach((rank, i) => {
      const y = top + i * row;
      let x = left;
      make(svg, "text", {x: left - 8, y: y + 14, "text-anchor": "end", class: "strong"}, `rank ${rank.rank}`);
      for (const phase of used) {
        const wide = (rank.phases[phase] || 0) / longest * (right - left);
        if (wide <= 0) continue;
        const part = make(svg, "rect", {class: "outline", x, y, width: wide, height: 20, fill: `url(#hatch-${phase})`});
        make(part, "title", {}, `${phase} ${duration(rank.phases[phase])}`);
        x += wide;
      }
      const slow = straggler && straggler.rank === rank.rank;
      make(svg, "text", {x: x + 6, y: y + 14, class: "strong"}, duration(total(rank)) + (slow ? " ◀ slow" : ""));
      if (rank.phases.hidden > 0) {
        const wide = Math.min(1, rank.phases.hidden / longest) * (right - left);
        const line = make(svg, "line", {x1: left, x2: left + wide, y1: y + 25, y2: y + 25, stroke: "var(--ink)", "stroke-width": 2, "stroke-dasharray": "3 2"});
        make(line, "title", {}, `communication hidden behind the backward pass: ${duration(rank.phases.hidden)}`);
      }
      sentences.push(`rank ${rank.rank}: ${used.map(phase => `${phase} ${duration(rank.phases[phase] || 0)}`).join(", ")}`);
    });
    if (told.length === 0) make(svg, "text", {x: width / 2, y: top + 16, "text-anchor": "middle"}, "nothing yet");
    svg.setAttribute("aria-label", sentences.join("; ") || "nothing yet");
    host.replaceChildren(svg);
  }

  return {curves, bars, sample, phases, short, duration};
})();
