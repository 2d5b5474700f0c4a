/** The workers that the page knows: those that are there, and for the length of the history those that are gone. */

import { MAX_AGE_S, MAX_BYTES } from "./history.js";
import { AWAY } from "./presence.js";
import { Worker } from "./worker.js";

export const MAX_DEPARTED = 8;

/** Keeps workers by id, and shares the memory of their histories out among them. */
export class Roster {
  constructor() {
    this.workers = new Map();
  }

  /** The worker of that id, which is there from now on. */
  present(id, now_s) {
    let worker = this.workers.get(id);
    if (worker === undefined) {
      worker = new Worker(id);
      this.workers.set(id, worker);
      this.#shareMemory(now_s);
    }
    worker.presence.comeBack(now_s);
    return worker;
  }

  /** These `{worker, model, state}` are there and no others; `held_s` is the moment on the screen, null when live. */
  take(list, now_s, held_s) {
    const ids = new Set(list.map(({ worker }) => worker));
    for (const worker of this.workers.values()) if (!ids.has(worker.id) && !worker.presence.isGone) this.#leave(worker, now_s);
    for (const info of list) this.present(info.worker, now_s).info = info;
    this.prune(now_s, held_s);
  }

  /** Let go of departed workers: the oldest of too many, and those whose past is over, unless time is held in it. */
  prune(now_s, held_s) {
    const all = [...this.workers.values()];
    const departed = all.filter(({ presence }) => presence.isGone).sort((a, b) => a.presence.goneSince_s - b.presence.goneSince_s);
    departed.forEach((worker, i) => {
      const isLooked = held_s !== null && worker.presence.at(held_s) !== AWAY;
      const isOver = worker.presence.goneSince_s <= now_s - MAX_AGE_S && !isLooked;
      if (isOver || i < departed.length - MAX_DEPARTED) this.workers.delete(worker.id);
      else worker.history.trim(now_s); // nothing is added to it any more, which would do so
    });
    for (const { presence } of all) presence.forgetBefore(now_s - MAX_AGE_S);
    if (this.workers.size < all.length) this.#shareMemory(now_s);
  }

  #leave(worker, now_s) {
    if (worker.live === null) this.workers.delete(worker.id); // it has no past
    else worker.leave(now_s);
  }

  #shareMemory(now_s) {
    for (const { history } of this.workers.values()) {
      history.maxBytes = MAX_BYTES / this.workers.size;
      history.trim(now_s);
    }
  }
}
