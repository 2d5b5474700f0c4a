"""POST /v1/responses: a stateless form of OpenAI's Responses API. Requests become chats; answers become output items and events."""
