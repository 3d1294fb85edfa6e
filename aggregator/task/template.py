"""The task file that ``init`` writes: every key with its default, ready to be edited."""

from __future__ import annotations

TASK_TEMPLATE = """\
# What this fleet learns, and how. Paths are relative to this file. Lines that start with '#' show
# defaults. tessera-aggregator serve checks the file and names any key that it does not like.

[task]
# name = "default"             # devices name it when they join: 1 to 64 of a-z 0-9 . _ -
# cohort = "all"
# method = "scatter"
artifact = "shipped:mf"        # a folder made by tessera-export, or shipped:mf
catalogue = "items.tsv"        # one item a line: id, or id<TAB>title. Append only
# Methods on the devices' own arrays (fedavg, teacher_logits, mutual, attention) have no catalogue;
# 'artifacts' lists their models' folders, smallest first. Their settings: docs/aggregator.md.
# broadcast_codec = "float16"  # or float32, int8, int4
# update_codec = "int8"        # or float16, float32

[broker]
url = "mqtt://127.0.0.1:1883"  # mqtts://host:8883 for TLS
# prefix = "tessera"           # all topics lie below it
# user = "tessera-aggregator"
# password_file = "broker-password"
# ca_file = "ca.pem"           # with mqtts:// and an authority of your own
# certificate_file = "client.pem"
# key_file = "client.key"

[round]
# share = 1.0                  # expected share of the devices in each round
# quorum = 1                   # updates that make a new version
# wait_for_devices = 1         # no round before so many are enrolled (default: the quorum)
# deadline_seconds = 300.0
# adaptive_deadline = false    # true: p90 of the last rounds' arrival times, times the margin
# deadline_margin = 1.5
# least_deadline_seconds = 5.0
# resume_grace_seconds = 30.0  # after a restart a round stays open at least this long
# pause_seconds = 0.0          # between rounds
# most_rounds = 0              # stop after this many; 0: never
# train_seconds = 150.0        # devices pick a k, or a model, that fits this (default: half)

[scatter]
# columns = 64                 # K, the full width of the model
# aggregator = "coverage"      # or mean
# spread = 0.1                 # standard deviation of a new item's vector
# clip_norm = 0.0              # larger updates are scaled down to this norm; 0: no limit
# clip_multiple = 4.0          # likewise, as a multiple of the fleet's median norm; 0: no limit
# row_multiple = 16.0          # likewise, of each row: docs/methods/robust.md
# outlier_multiple = 0.0       # 3: updates that are out of line with the fleet's are left out
# item_multiple = 0.0          # 1.25: vectors too long for how often their item is touched shrink
# robust = "none"              # or trimmed, median: a round's updates are held in memory
# trim_share = 0.1             # what trimmed leaves out at either end

[scatter.optimizer]
# name = "adam"                # or plain
# learning_rate = 0.02

[scatter.training]
# scores = "residual"          # or columns
# user_learning_rate = 0.7
# user_l2 = 0.01
# item_l2 = 0.001
# user_spread = 0.01
# most_triples = 0             # at most so many a device and round; 0: all

[store]
# group_updates = 128          # updates a commit at most
# checkpoint_updates = 20000
# verdict_days = 30            # how long a closed round's verdicts are kept: days served

[keys]
# descriptor_days = 30         # a renewed descriptor holds this long, then devices refuse it

[admission]                    # shares of the time, at most; what is beyond them asks again
# opens_share = 0.35           # of sessions' opens
# enrolments_share = 0.15

[metrics]
# port = 0                     # Prometheus on 127.0.0.1; 0: none
"""
