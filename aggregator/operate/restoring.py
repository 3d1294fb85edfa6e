"""What a home needs that was put back from a backup."""

from __future__ import annotations

from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome, serve_lock
from aggregator.keys.folder import USUAL_LIVES, renew_descriptor
from aggregator.operate.lookup import SECONDS_LIMIT, require_number
from aggregator.store import Store
from device_sdk.wire.seal.broadcast import new_group_key
from device_sdk.wire.seal.keys import RandomBytes


def begin_generation(
    home: AggregatorHome, store: Store, now: int, after: int, random_bytes: RandomBytes
) -> int:
    """Begin a new generation, which is returned: devices have seen rounds that the backup does not
    know. Raises AggregatorError."""
    require_number("the Unix time to begin after", after, 0, SECONDS_LIMIT)
    # A serve that runs would go on with the round that is given up here, in the old generation.
    with serve_lock(home):
        tasks = [store.task(each.number) for each in store.tasks.all()]
        newest = max(task.facts.generation for task in tasks)
        if not after and now < newest:
            raise AggregatorError(
                f"this machine's clock is behind the backup's generation, {newest}: "
                "set it first or, if it is right and the other was not, give that number as --after"
            )
        # A fleet that is less than a second old has this second's number already; and so may a
        # group key that took the place of the last generation's.
        epoch = max((key.epoch for key in store.secrets.group_keys()), default=0)
        generation = max(now, after + 1, newest + 1, epoch + 1)
        with store.database.transaction():
            store.end_cluster()
            store.facts.generation = generation
            # Lives of the home that this one replaces began before: see aggregator/keys/fence.py.
            begun = max(now, after, store.facts.started_unix_seconds or 0)
            store.facts.started_unix_seconds = store.facts.announced_unix_seconds = begun
            # Another epoch than any that was used after the backup was made.
            store.secrets.add_group_key(new_group_key(generation, random_bytes))
            store.facts.rotation_due = True
            for task in tasks:
                for row in task.rounds.latest():
                    if row.unfinished:
                        task.rounds.give_up(row.round, now)
                task.checkpoints.drop_partial()
        renew_descriptor(home, store, now, random_bytes, USUAL_LIVES.descriptor_seconds)
        return generation
