"""The serving cluster: routers take HTTP requests and stream the output of workers. This package never imports torch."""
