// Requests to the server: JSON, event streams, plain errors, and whether the server can be reached.

/** An error of the API or of the connection. `title` is a short plain reason; `message` is the server's text. */
export class ApiError extends Error {
  constructor(status, message, { code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }

  get title() {
    if (this.status === 0) return "The connection was lost";
    if (this.status === 401) return "An API key is required";
    if (this.status === 403) return "Not allowed";
    if (this.status === 429) return "The server is busy";
    if (this.status === 504 || this.code === "timeout") return "It took too long";
    if (this.status >= 500) return "The server has a problem";
    return "The server refused this request";
  }

  /** What the user can do, when the message does not already tell it. */
  get hint() {
    if (this.status === 0) return "What was written so far is kept. Continue when the server is back.";
    if (this.status === 429) return `Try again${this.retryAfter ? ` in ${this.retryAfter} s` : " in a moment"}.`;
    if (this.status === 401) return "Reload the page: the browser asks for the key (as the password, with any name).";
    if (this.status >= 500) return "Try again; the server's log has the details.";
    return this.param ? `Change "${this.param}" in Settings or the text, and try again.` : "";
  }
}

/** Whether the server answers; dispatches "change". */
class Connection extends EventTarget {
  state = "connecting";
  #timer = 0;
  #attempts = 0;

  set(state) {
    if (this.state === state) return;
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }

  lost() {
    this.set("reconnecting");
    if (!this.#timer) this.#schedule();
  }

  ok() {
    this.#attempts = 0;
    this.set("online");
  }

  retryNow() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#try();
  }

  #schedule() {
    const wait = Math.min(5000, 500 * 1.6 ** this.#attempts++);
    this.#timer = setTimeout(() => { this.#timer = 0; this.#try(); }, wait);
  }

  async #try() {
    try {
      const reply = await fetch("ready", { cache: "no-store" });
      if (reply.ok) { this.ok(); return; }
    } catch { /* still unreachable */ }
    if (!this.#timer) this.#schedule();
  }
}

export const connection = new Connection();

async function request(path, options) {
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connection.lost();
    throw new ApiError(0, "the server cannot be reached");
  }
  if (connection.state === "connecting") connection.ok();
  if (!reply.ok) throw await errorOf(reply);
  return reply;
}

async function errorOf(reply) {
  let body = {};
  try { body = (await reply.json()).error ?? {}; } catch { /* not from this server */ }
  const retryAfter = reply.headers.get("retry-after");
  return new ApiError(reply.status, body.message ?? `HTTP status ${reply.status}`, { ...body, retryAfter });
}

export async function get(path) {
  return (await request(path, { cache: "no-store" })).json();
}

export async function post(path, body, signal) {
  return (await request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal })).json();
}

/** Send a request and call `onEvent` with each object of the event stream; rejects with ApiError or AbortError. */
export async function stream(path, body, signal, onEvent) {
  const reply = await request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let isDone = false;
  while (!isDone) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      part = { done: true };
    }
    if (part.done) break;
    pending += part.value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") { isDone = true; break; }
      const value = JSON.parse(data);
      if (value.error) throw new ApiError(value.error.code === "engine_error" ? 503 : 500, value.error.message, value.error);
      onEvent(value);
    }
  }
  if (signal.aborted) throw new DOMException("stopped", "AbortError");
  if (!isDone) {
    connection.lost();
    throw new ApiError(0, "the connection ended before the answer did");
  }
}

/** Return a short random name for a request; /cache shows it with the request's blocks. */
export const newRequestId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (each) => each.toString(16).padStart(2, "0")).join("");

/** One generation: its text, tokens, counts and times as they arrive. */
export class Run {
  id = newRequestId();
  text = "";
  reasoning = "";
  tokens = []; // {text, logprob, top: [{text, logprob}], id}
  numTokens = 0;
  state = "waiting"; // then "running", "done", "stopped" or "failed"
  finish = null;
  usage = null;
  timings = null;
  error = null;
  #controller = new AbortController();

  /** @param onUpdate is called after every event; the caller coalesces. */
  constructor(path, body, onUpdate) {
    Object.assign(this, { path, onUpdate });
    this.body = { ...body, stream: true, stream_options: { include_usage: true }, timings: true, request_id: this.id };
  }

  get isActive() { return this.state === "waiting" || this.state === "running"; }

  async start() {
    this.sent = performance.now();
    try {
      await stream(this.path, this.body, this.#controller.signal, (event) => this.#add(event));
      this.state = "done";
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      if (this.state === "failed") this.error = error instanceof ApiError ? error : new ApiError(500, String(error));
    }
    this.ended = performance.now();
    this.onUpdate();
    return this;
  }

  stop() { this.#controller.abort(); }

  #add(event) {
    const choice = event.choices[0];
    if (event.usage) this.usage = event.usage;
    if (event.timings) this.timings = event.timings;
    if (choice) {
      if (this.state === "waiting") { this.state = "running"; this.first = performance.now(); }
      this.text += choice.text ?? choice.delta?.content ?? "";
      this.reasoning += choice.delta?.reasoning_content ?? "";
      this.finish = choice.finish_reason ?? this.finish;
      const ids = choice.token_ids ?? [];
      const scores = choice.logprobs?.content ?? completionScores(choice.logprobs);
      const added = Math.max(ids.length, scores.length);
      this.numTokens += added || (choice.text || choice.delta?.content || choice.delta?.reasoning_content ? 1 : 0);
      for (let index = 0; index < added; index++) this.tokens.push(detail(scores[index], ids[index]));
      this.last = performance.now();
    }
    this.onUpdate();
  }

  /** Return what is shown under the text. */
  stats() {
    const seconds = ((this.last ?? this.first) - this.first) / 1000;
    const rate = this.timings?.tokens_per_second ?? (this.numTokens > 1 && seconds > 0 ? (this.numTokens - 1) / seconds : null);
    return {
      tokens: this.usage?.completion_tokens ?? this.numTokens,
      rate,
      first: this.timings?.first_token_seconds ?? (this.first ? (this.first - this.sent) / 1000 : null),
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      preemptions: this.timings?.preemptions ?? 0,
      drafts: this.timings?.draft_tokens ?? 0,
      accepted: this.timings?.accepted_tokens ?? 0,
    };
  }
}

/** Return chat-like scores of a completion's parallel lists. */
function completionScores(logprobs) {
  return (logprobs?.tokens ?? []).map((token, index) => ({
    token,
    logprob: logprobs.token_logprobs[index],
    top_logprobs: Object.entries(logprobs.top_logprobs?.[index] ?? {}).map(([name, value]) => ({ token: name, logprob: value })),
  }));
}

function detail(score, id = null) {
  if (!score) return { text: "", logprob: null, top: [], id };
  const top = score.top_logprobs.map((each) => ({ text: each.token, logprob: each.logprob })).sort((a, b) => b.logprob - a.logprob);
  return { text: score.token, logprob: score.logprob, top, id };
}
