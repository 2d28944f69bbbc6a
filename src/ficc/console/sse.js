/**
 * Server-sent events out of bytes that may be cut anywhere, inside a character too.
 * Source: the HTML standard, "Server-sent events"; only `data` matters here.
 */

export class EventParser {
  #decoder = new TextDecoder();
  #rest = "";
  #data = [];

  /** The data of each event that these bytes complete. */
  push(bytes) {
    const text = this.#rest + this.#decoder.decode(bytes, { stream: true });
    // A CR at the very end may be half of a CRLF.
    const usable = text.endsWith("\r") ? text.slice(0, -1) : text;
    const lines = usable.split(/\r\n|\r|\n/);
    this.#rest = lines.pop() + text.slice(usable.length);
    const complete = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) complete.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.startsWith("data: ") ? line.slice(6) : line.slice(5));
      }
    }
    return complete;
  }
}

/** The connection broke while a body was read. */
export class Broken extends Error {}

/** The data of each event of a body. What is unfinished at its end is no event. Raises Broken. */
export async function* events(body) {
  const parser = new EventParser();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((cause) => {
        throw new Broken("the body broke off", { cause });
      });
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    await reader.cancel().catch(() => {}); // broken already, or left early by whoever reads
  }
}
