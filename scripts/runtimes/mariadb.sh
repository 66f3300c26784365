# A server of its own, in which a table is filled, grouped, joined and changed.
directory=$(mktemp -d)
chmod 755 "$directory"
options="--no-defaults --socket=$directory/socket"
mariadb-install-db --no-defaults --user=root --datadir="$directory/data" --auth-root-authentication-method=normal >/dev/null 2>&1
mariadbd $options --user=root --datadir="$directory/data" --skip-networking --innodb-buffer-pool-size=128M 2>/dev/null &
for i in $(seq 300); do mariadb-admin $options ping >/dev/null 2>&1 && break; sleep 0.2; done
mariadb $options -N <<'SQL'
create database d; use d;
create table t (i int primary key, m char(32), k int, key (k)) engine=innodb;
insert into t select seq, md5(seq), (seq * 7919) % 10007 from seq_1_to_200000;
select sum(crc32(m)), count(distinct k) from t;
select k % 10, count(*), sum(i) from t group by 1 order by 1;
select sum(a.i + b.i) from t a join t b using (k) where a.i < 5000;
update t set m = md5(m) where i % 3 = 0;
select sum(crc32(m)) from t;
SQL
mariadb-admin $options shutdown
wait $!
echo "ended with $?"
rm -rf "$directory"
