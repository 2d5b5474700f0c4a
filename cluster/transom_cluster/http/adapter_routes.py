"""The routes with which an operator loads and unloads LoRA adapters, with the names and answers of vLLM's."""

from typing import Annotated

from fastapi import Body, FastAPI
from starlette.responses import PlainTextResponse, Response

from transom_cluster.router.router import Router

Name = Annotated[str, Body(min_length=1, max_length=256)]
Path = Annotated[str, Body(min_length=1, max_length=4096)]


def add_routes(api: FastAPI, router: Router) -> None:
    """Add the routes to the app."""

    @api.post("/v1/load_lora_adapter", include_in_schema=False)
    async def load_lora_adapter(
        lora_name: Name, lora_path: Path, load_inplace: Annotated[bool, Body()] = False
    ) -> Response:
        await router.adapter_loader.load(lora_name, lora_path, in_place=load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{lora_name}' added successfully.")

    @api.post("/v1/unload_lora_adapter", include_in_schema=False)
    async def unload_lora_adapter(lora_name: Annotated[Name, Body(embed=True)]) -> Response:
        await router.adapter_loader.unload(lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{lora_name}' removed successfully.")
