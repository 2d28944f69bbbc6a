"""The management API: FastAPI routes over operations. The OpenAPI document says what they do."""
