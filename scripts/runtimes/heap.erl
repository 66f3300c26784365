%% Processes fill maps and a table that they share, collect their garbage, and send sums.
-module(heap).
-export([main/0]).

main() ->
    Table = ets:new(table, [set, public]),
    Parent = self(),
    Pids = [spawn_link(fun() -> Parent ! {self(), work(Table, N)} end) || N <- lists:seq(1, 5)],
    [io:format("~p~n", [receive {Pid, Sum} -> Sum end]) || Pid <- Pids],
    io:format("~p~n", [ets:foldl(fun({{N, X}, B}, A) -> (A + N * X + erlang:crc32(B)) rem 1000000007 end, 0, Table)]),
    halt(0).

work(Table, N) ->
    Map = maps:from_list([{X, integer_to_binary(X * N)} || X <- lists:seq(1, 100000)]),
    maps:foreach(fun(X, B) -> ets:insert(Table, {{N, X}, B}) end, Map),
    garbage_collect(),
    maps:fold(fun(X, B, A) -> (A + X + byte_size(B)) rem 1000003 end, 0, Map).
