"""Work on files of tables: tasks for engines, the durable plan of a job, and the snapshot that names new files."""
