/** A hue for each group's name, the same over all workers, in the order in which names are first seen. */

export class GroupHues {
  constructor() {
    this.names = [];
  }

  /** The hue index of each group of a worker. */
  of(geometry) {
    return geometry.groups.map((group) => this.indexOf(group.name));
  }

  indexOf(name) {
    const known = this.names.indexOf(name);
    return known >= 0 ? known : this.names.push(name) - 1;
  }
}
