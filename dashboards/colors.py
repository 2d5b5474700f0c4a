"""Colours of series that mean the same on every panel. Red is kept for what is wrong.

Blue, yellow, orange and grey are told apart by the colour-blind too; green and red are never a pair that matters.
"""

GREY = "#808080"

BLOCK_STATES = {"active": "blue", "cached": "yellow", "empty": GREY}
PAGE_STATES = {"leased": "blue", "free": GREY}
OUTCOMES = {  # missed is grey where nothing could have been done, and warm where more memory would have hit
    "hit": "blue",
    "repaired": "yellow",
    "missed": GREY,
    "missed below_alignment": "light-purple",
    "missed last_token": "purple",
    "missed policy": "dark-purple",
    "missed window_evicted": "orange",
    "missed state_not_kept": "dark-orange",
    "missed full_evicted": "red",
}
STATUSES = {"2..": "blue", "4..": "yellow", "5..": "red"}
ERRORS = {"5xx": "red", "429": "yellow", "499": "super-light-blue"}
ENDS = {"stop": "blue", "length": "super-light-blue", "abort": "yellow", "error": "red"}
BREAKS = {
    "client_left": "yellow",
    "request_timeout": "orange",
    "overloaded": "light-orange",
    "worker_unavailable": "red",
    "step_failed": "dark-red",
    "internal_error": "light-red",
    "poison_request": "purple",
    "request_refused": GREY,
}
ENDPOINTS = {"/v1/completions": "blue", "/v1/chat/completions": "super-light-blue", "/metrics": GREY, "other": "orange"}
REQUESTS = {"running": "blue", "waiting in workers": "yellow", "waiting at routers": "orange"}
PHASES = {"prefill": "blue", "decode": "super-light-blue", "repair": "yellow", "recompute": "orange"}
PARTS = {
    "forward": "blue",
    "sample": "super-light-blue",
    "prepare": "purple",
    "copy": "orange",
    "schedule": "yellow",
    "output": GREY,
}
MEMORY = {"weights": "blue", "kv": "yellow", "other": GREY}
WORKER_STATES = {"open": "blue", "closed": "orange", "draining": "yellow"}
WORKER_CHANGES = {"joined": "blue", "drained": "yellow", "lost": "red"}
CALL_OUTCOMES = {"parsed": "blue", "incomplete": "yellow", "malformed": "orange"}
DRAINS = {"finished": "blue", "moved": "yellow"}
FAILOVERS = {"resumed": "blue", "gave_up": "red", "poison": "purple"}
