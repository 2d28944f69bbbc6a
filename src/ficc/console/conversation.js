/**
 * A conversation with one service, in this window's memory only: turns of a question and its answer, of which at
 * most one is under way. How each answer ended is kept with it.
 */

import { ApiError } from "./api.js";
import { complete } from "./completions.js";

/** What an engine sent that is no event of a chat is told like any other error. */
const understood = (error) =>
  error instanceof ApiError
    ? error
    : new ApiError({ code: "unknown", message: `The answer is not readable: ${error}` });

/** Dispatches `change`. */
export class Conversation extends EventTarget {
  /**
   * Each {question, answer, state, error, requestId, finish, tokens, askedAt, firstAt, lastAt}; times are in
   * milliseconds. `state` is "waiting", "answering", "stopping", "done", "stopped" or "incomplete".
   */
  turns = [];
  #controller = null;

  get busy() {
    return this.#controller !== null;
  }

  /** What the engine is told of earlier turns: those that have an answer. */
  #history() {
    return this.turns
      .filter((turn) => turn.answer)
      .flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.answer },
      ]);
  }

  /** Ask, and follow the answer to its end. A refusal leaves no turn, and is returned. */
  async ask(service, question) {
    const messages = [...this.#history(), { role: "user", content: question }];
    const turn = {
      question,
      answer: "",
      state: "waiting",
      error: null,
      requestId: null,
      finish: null,
      tokens: 0,
      askedAt: performance.now(),
      firstAt: null,
      lastAt: null,
    };
    this.turns.push(turn);
    this.#controller = new AbortController();
    this.#changed();
    let refused = null;
    try {
      for await (const piece of complete(service, messages, this.#controller.signal)) this.#take(turn, piece);
      turn.state = "done";
    } catch (error) {
      refused = this.#ended(turn, understood(error));
    }
    this.#controller = null;
    this.#changed();
    return refused;
  }

  #take(turn, piece) {
    if (piece.text) {
      turn.lastAt = performance.now();
      turn.firstAt ??= turn.lastAt;
      turn.answer += piece.text;
      turn.tokens += 1; // engines send one piece for each token, but for rare characters; `usage` corrects it
      if (turn.state === "waiting") turn.state = "answering";
    }
    turn.requestId = piece.requestId ?? turn.requestId;
    turn.finish = piece.finish ?? turn.finish;
    turn.tokens = piece.tokens ?? turn.tokens;
    this.#changed();
  }

  #ended(turn, error) {
    if (this.#controller.signal.aborted) {
      turn.state = "stopped";
    } else if (turn.requestId === null) {
      this.turns.splice(this.turns.indexOf(turn), 1);
      return error;
    } else {
      turn.state = "incomplete";
      turn.error = error;
    }
    return null;
  }

  stop() {
    const turn = this.turns.at(-1);
    if (!this.busy || turn.state === "stopping") return;
    turn.state = "stopping";
    this.#changed();
    this.#controller.abort();
  }

  clear() {
    this.turns = [];
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}
