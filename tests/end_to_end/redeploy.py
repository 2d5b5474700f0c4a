"""Deploys the app again on a running server's Ray, as `serve deploy` does:  python redeploy.py ADDRESS SETTINGS_AS_JSON"""

import json
import os
import sys

import ray
from ray import serve

from transom_cluster.app import build_app
from transom_cluster.commands.local_ray import APP_NAME

address, settings = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
serve.run(build_app(json.loads(settings)), name=APP_NAME)
sys.stdout.flush()
os._exit(0)  # leave the cluster as it is
