(* A map is filled, compacted, read and made anew. *)
module M = Map.Make (Int)

let () =
  let map = ref M.empty in
  for i = 0 to 300_000 do map := M.add (i * 7919 mod 1000003) (string_of_int i) !map done;
  Gc.compact ();
  for _ = 1 to 3 do
    Printf.printf "%d\n" (M.fold (fun key text sum -> (sum * 31 + key + String.length text) mod 1000000007) !map 0);
    map := M.map (fun text -> text ^ "x") !map
  done
