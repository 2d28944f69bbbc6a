/** Numbers and times as people read them, in the page's language. */

const LANGUAGE = globalThis.document?.documentElement.lang || "en";
const UNITS = ["byte", "kilobyte", "megabyte", "gigabyte", "terabyte"];
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86_400;

const plain = new Intl.NumberFormat(LANGUAGE);
const oneDecimal = new Intl.NumberFormat(LANGUAGE, { maximumFractionDigits: 1 });
const plurals = new Intl.PluralRules(LANGUAGE);
const timeOfDay = new Intl.DateTimeFormat(LANGUAGE, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});
const dateAndTime = new Intl.DateTimeFormat(LANGUAGE, { dateStyle: "medium", timeStyle: "medium" });
const sizes = UNITS.map(
  (unit, power) =>
    new Intl.NumberFormat(LANGUAGE, {
      style: "unit",
      unit,
      maximumFractionDigits: power < 2 ? 0 : 1,
    }),
);

export const number = (value) => plain.format(value);
export const decimal = (value) => oneDecimal.format(value);

/** "1 request", "3 requests": English, which makes all its plurals here with an s. */
export const count = (value, noun) =>
  `${plain.format(value)} ${noun}${plurals.select(value) === "one" ? "" : "s"}`;

/** Decimal units, as the command line has them. */
export function bytes(value) {
  let power = 0;
  for (let rest = value; rest >= 1000 && power < UNITS.length - 1; rest /= 1000) power += 1;
  return power === 0 ? `${plain.format(value)} B` : sizes[power].format(value / 1000 ** power);
}

/** A part of a whole in whole percent, never 100 before it is all there. */
export const percent = (part, whole) => (whole === 0 ? 100 : Math.floor((part / whole) * 100));

/** An exact span, for something that is under way: "12 s", "2 min 10 s", "1 h 5 min". */
export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 90 * MINUTE) return `${Math.floor(whole / MINUTE)} min${some(whole % MINUTE, "s")}`;
  if (whole < 2 * DAY)
    return `${Math.floor(whole / HOUR)} h${some(Math.floor((whole % HOUR) / MINUTE), "min")}`;
  return `${Math.floor(whole / DAY)} d${some(Math.floor((whole % DAY) / HOUR), "h")}`;
}

const some = (value, unit) => (value ? ` ${value} ${unit}` : "");

/** A span of something at rest, to its largest unit, so that it does not tick: "40 s", "3 min", "5 h". */
export function age(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < MINUTE) return `${whole} s`;
  if (whole < HOUR) return `${Math.floor(whole / MINUTE)} min`;
  return whole < 2 * DAY ? `${Math.floor(whole / HOUR)} h` : `${Math.floor(whole / DAY)} d`;
}

/** A limit of time, whose measurement is a little off what was set: 599.2 s is "10 min". */
export const limit = (seconds) =>
  seconds < 90 ? `${Math.round(seconds)} s` : duration(Math.round(seconds / 10) * 10);

export const clockTime = (milliseconds) => timeOfDay.format(milliseconds);
export const dateTime = (milliseconds) => dateAndTime.format(milliseconds);

/** Thousandths of a core. */
export const cores = (millis) => (millis === 1000 ? "1 core" : `${oneDecimal.format(millis / 1000)} cores`);

/** A name as it can be pasted into a shell. */
export const pasteable = (name) =>
  /^[\w@%+=:,./-]+$/.test(name) ? name : `'${name.replaceAll("'", `'"'"'`)}'`;
