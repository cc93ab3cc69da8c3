/** Series for a chart: times without samples are gaps. */

/** A time this many times as long as usual between two samples is a gap. */
const MANY = 4;

/**
 * @param {{at: string}[]} points oldest first; one whose numbers are all `null` begins a gap
 * @param {string[]} keys
 * @returns {(number | null)[][]} times in seconds, and a series for each key
 */
export function seriesOf(points, keys) {
  const times = points.map((point) => Date.parse(point.at) / 1000);
  const distances = times.slice(1).map((time, index) => time - times[index]);
  const usual = [...distances].sort((a, b) => a - b)[Math.floor(distances.length / 2)] ?? 0;
  /** @type {(number | null)[][]} */
  const series = [[], ...keys.map(() => [])];
  points.forEach((point, index) => {
    if (index && usual > 0 && distances[index - 1] > MANY * usual) {
      series[0].push(times[index - 1] + usual);
      keys.forEach((_, key) => series[key + 1].push(null));
    }
    series[0].push(times[index]);
    keys.forEach((name, key) => series[key + 1].push(point[name] ?? null));
  });
  return series;
}

/**
 * @param {{at: string, seconds: number, count: number}[]} deaths oldest first
 * @param {number[]} [span] seconds that the chart shows at least, from and to
 * @returns {(number | null)[][]} times in seconds, and the deaths at each; 0 between them
 */
export function deathsOf(deaths, [from, to] = [Infinity, -Infinity]) {
  /** @type {[number[], number[]]} */
  const series = [[], []];
  for (const { at, seconds, count } of deaths) {
    const start = Date.parse(at) / 1000;
    // The end of the time before is the beginning of this one.
    if (start <= (series[0].at(-1) ?? -Infinity)) {
      series[0].pop();
      series[1].pop();
    }
    series[0].push(start);
    series[1].push(count);
    // The last step isn't over: nothing says that none will die in the rest of it.
    const last = Number.isFinite(to) && start + seconds >= to;
    series[0].push(last ? Math.max(start, to) : start + seconds);
    series[1].push(last ? count : 0);
  }
  if (from < (series[0][0] ?? Infinity)) {
    series[0].unshift(from);
    series[1].unshift(0);
  }
  if (to > (series[0].at(-1) ?? -Infinity)) {
    series[0].push(to);
    series[1].push(0);
  }
  return series;
}
