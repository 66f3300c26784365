# A server of its own, in which tables are filled, grouped, joined and sorted, with its compiler of queries.
set -e
PATH=$(ls -d /usr/lib/postgresql/*/bin):$PATH
directory=$(mktemp -d)
initdb -D "$directory/data" -U owner --no-sync >/dev/null
pg_ctl -D "$directory/data" -l "$directory/log" -w start >/dev/null \
    -o "-c listen_addresses='' -k $directory -c shared_buffers=16MB -c work_mem=64MB -c fsync=off"
psql -h "$directory" -U owner -qAt postgres <<'SQL'
create table t as select i, md5(i::text) m, (i * 7919) % 100003 k from generate_series(1, 400000) i;
select sum(hashtext(m)), count(distinct k) from t;
set jit_above_cost = 0;
select k % 10, count(*), sum(i) from t group by 1 order by 1;
select sum(a.i * b.i) from t a join t b on a.k = b.k where a.i < 20000;
select md5(string_agg(m, '' order by k, i)) from t;
SQL
pg_ctl -D "$directory/data" -m fast -w stop >/dev/null
rm -rf "$directory"
