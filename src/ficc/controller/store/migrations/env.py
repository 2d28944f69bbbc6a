"""How migrations run: on the connection that `Database.migrate` hands over, in its transaction."""

from alembic import context

from ficc.controller.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
