"""How rows get into a table of MySQL or MariaDB: as text, in binary bulk, or as requests that wait."""
