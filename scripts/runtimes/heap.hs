-- Four threads fill a map each and read it twice.
import Control.Concurrent
import Control.Monad
import qualified Data.Map.Strict as Map

work :: Int -> Int
work number = sum 31 filled + sum 37 (Map.map (++ "x") filled)
  where
    filled = Map.fromList [((i * 7919) `mod` 300007, show (i * number)) | i <- [0 .. 100000]]
    sum factor = Map.foldlWithKey' (\a key text -> (a * factor + key + length text) `mod` 1000000007) 0

main :: IO ()
main = do
  results <- forM [1 .. 4] $ \number -> do
    result <- newEmptyMVar
    _ <- forkIO $ putMVar result $! work number
    return result
  forM_ results $ takeMVar >=> print
