/** Lines over time, drawn by uPlot in the colours of the theme. */

import uPlot from "../vendor/uplot.js";
import { exact, rate } from "./format.js";
import { html, useEffect, useRef } from "./html.js";
import { colour, onTheme } from "./theme.js";

const perSecond = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const SPARK = { width: 88, height: 24 };

/** Draw a chart, redraw it when the theme changes, and update its data. */
function useChart(options, data) {
  const element = useRef(null);
  const chart = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const draw = () => {
      chart.current?.destroy();
      chart.current = new uPlot(options(element.current), latest.current, element.current);
    };
    draw();
    const unsubscribe = onTheme(draw);
    const resized = new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width && chart.current.width !== width) chart.current.setSize({ width, height: chart.current.height });
    });
    resized.observe(element.current);
    return () => {
      unsubscribe();
      resized.disconnect();
      chart.current.destroy();
    };
  }, []);
  useEffect(() => chart.current.setData(data), [data]);
  return element;
}

const spark = () => ({
  ...SPARK,
  legend: { show: false },
  cursor: { show: false },
  axes: [{ show: false }, { show: false }],
  scales: { x: { time: false }, y: { range: (_, low, high) => [0, Math.max(1, high)] } },
  padding: [2, 0, 2, 0],
  series: [{}, { stroke: colour("--line"), fill: colour("--line-fill"), width: 1.5, points: { show: false } }],
});

/** A line without axes. @param {{values: number[], what: string}} props oldest first */
export function Sparkline({ values, what }) {
  const shown = values.length > 1 ? values : [values[0] ?? 0, values[0] ?? 0];
  const element = useChart(spark, [shown.map((_, index) => index), shown]);
  const label = values.length
    ? `${what}, last hour: from ${exact(values[0])} to ${exact(values.at(-1))}, at most ${exact(Math.max(...values))}`
    : `${what}: no data yet`;
  return html`<span class="spark" ref=${element} role="img" aria-label=${label} title=${label}></span>`;
}

const trend = (lines, asRate, height) => (element) => {
  const show = (value) => (asRate ? rate(value) : exact(value));
  const axis = { stroke: colour("--fg-muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
  const tick = (value) => (asRate ? `${perSecond.format(value)}/s` : value % 1 ? "" : exact(value));
  const font = "11px system-ui, sans-serif";
  return {
    width: Math.floor(element.clientWidth) || 300,
    height,
    padding: [8, 8, 0, 0],
    cursor: { y: false, points: { size: 6 } },
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [
      { ...axis, font, size: 28, grid: { show: false }, space: 70, values: "{HH}:{mm}" },
      { ...axis, font, size: 52, values: (_, splits) => splits.map(tick) },
    ],
    series: [
      { value: "{HH}:{mm}:{ss}", label: "Time" },
      ...lines.map((line) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: 1.75,
        dash: line.dash,
        spanGaps: true,
        points: { show: false },
        value: (_, value) => (value == null ? "–" : show(value)),
      })),
    ],
  };
};

/**
 * Lines with axes and a legend that reads values under the pointer.
 *
 * @param {object} props
 * @param {string} props.title
 * @param {{at: string}[]} props.points oldest first
 * @param {{key: string, label: string, colour: string, dash?: number[]}[]} props.lines
 * @param {boolean} [props.asRate]
 */
export function Trend({ title, points, lines, asRate = false, height = 180 }) {
  const data = [points.map((point) => Date.parse(point.at) / 1000)];
  for (const line of lines) data.push(points.map((point) => point[line.key]));
  const element = useChart(trend(lines, asRate, height), data);
  const last = points.at(-1);
  const show = (value) => (asRate ? rate(value) : exact(value));
  const label = last ? lines.map((line) => `${line.label} ${show(last[line.key])}`).join(", ") : "no data yet";
  return html`
    <figure class="trend">
      <figcaption>${title}</figcaption>
      <div ref=${element} role="img" aria-label=${`${title}, last hour; now ${label}`}></div>
    </figure>
  `;
}
